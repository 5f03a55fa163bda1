"""
The other systems' equations, literally, as oracle.py has WhiteMatter's: one token, one layer, one
head at a time, in float64. From baselines.py it takes nothing but the names of the parameters.
"""

import torch
from oracle import Oracle, rms_norm, rope


class Iterated(Oracle):
    """Any schedule of a system in which every layer waits for states of past tokens.

    A subclass says what a past token, of states h[0..L], leaves for each layer (`memory`), what a
    token is to itself (`own`), and what every query of a layer reads (`dummy_entries`).
    """

    first = 0  # position of a document's first token

    def residual_of(self):
        """The states that the channels are made of: h[0..L] here."""
        return slice(None)

    def own(self, layer, x, position):
        return []

    def dummy_entries(self):
        return [[] for _ in range(self.L)]

    def stack(self, token, position, memories):
        """The states of a token that reads past tokens' memories, each a list over layers."""
        states, dummy = [self.embed(token)], self.dummy_entries()
        for layer in range(self.L):
            visible = [*dummy[layer], *(memory[layer] for memory in memories),
                       *self.own(layer, states[-1], position)]
            states.append(self.attend_and_mlp(layer, states[-1], position, visible))
        return states

    def autoregressive(self, row, doc):
        position, earlier = self.places(doc, self.first)
        h, memory = [], []
        for i, token in enumerate(row):
            h.append(self.stack(token, position[i], [memory[j] for j in earlier[i]]))
            memory.append(self.memory(h[i], position[i]))
        return [h]

    def sweeps(self, row, doc, groups, n_nograd, n_grad):
        position, earlier = self.places(doc, self.first)
        h = [[self.embed(token)] * (self.L + 1) for token in row]
        trace = []
        for t in range(n_nograd + n_grad):
            with torch.set_grad_enabled(t >= n_nograd):
                if t > 0 and t == n_nograd:
                    h = [[state.detach() for state in states] for states in h]
                for group in groups:
                    memory = [self.memory(*x) for x in zip(h, position)]
                    h = [self.stack(row[i], position[i], [memory[j] for j in earlier[i]])
                         if i in group else h[i] for i in range(len(row))]
            trace.append(h)
        return trace


class WhiteMatter(Iterated):
    """With `top_output` every L of the pool is L + 1; without a dummy positions begin at 0."""

    def __init__(self, params, config):
        super().__init__(params, config)
        self.first = 1 if config.dummy else 0
        self.n_sources = self.L + 1 if config.top_output else self.L

    def mixed_channels(self, branch, sources):
        layers, self.L = self.L, self.n_sources
        try:
            return super().mixed_channels(branch, sources)
        finally:
            self.L = layers

    def residual_of(self):
        return slice(0, self.n_sources)

    def memory(self, states, position):
        channels = self.pool(states[:self.n_sources], position)
        return [channels[layer % self.k] for layer in range(self.L)]

    def dummy_entries(self):
        if not self.config.dummy:
            return super().dummy_entries()
        return [[x] for x in self.memory([self.p["kv_pool.dummy"]] * self.n_sources, 0)]


class Feedback(Iterated):
    def memory(self, states, position):
        """m = sum_l softmax(w)_l h[l], embedding and final output included; one projection."""
        weights = torch.softmax(self.p["memory.weights"], 0)
        assert len(weights) == len(states) == self.L + 1
        m = sum(w * x for w, x in zip(weights, states))
        keys = self.split_heads(self.p["memory.k_proj"] @ m)
        keys = [rope(rms_norm(key, self.p["memory.k_norm"]), position) for key in keys]
        return [(keys, self.split_heads(self.p["memory.v_proj"] @ m))] * self.L


class Recurrent(Iterated):
    def residual_of(self):
        return slice(1, None)

    def memory(self, states, position):
        """A past token: each layer's norm and projections of its own output."""
        return [self.own_keys_values(layer, states[layer + 1], position)
                for layer in range(self.L)]

    def own(self, layer, x, position):
        """The token itself: the same of the layer's input."""
        return [self.own_keys_values(layer, x, position)]


class LCKV(Oracle):
    READS = {(6, 3): [0, 3, 3, 3, 4, 5], (5, 2): [0, 3, 3, 3, 4], (4, 0): [3, 3, 3, 3],
             (4, 1): [2, 2, 2, 3]}

    def __init__(self, params, config):
        super().__init__(params, config)
        self.reads = self.READS[config.n_layer, config.lckv_w]
        self.low = min(layer for layer, s in enumerate(self.reads) if s > layer)
        self.source = self.reads[self.low]

    def own_depth(self, layer, states, i, position, earlier, memory):
        """A vanilla layer on token i; memory[j]: what earlier tokens projected there."""
        memory[i] = self.own_keys_values(layer, states[-1], position[i])
        states.append(self.attend_and_mlp(layer, states[-1], position[i],
                                          [memory[j] for j in [*earlier[i], i]]))

    def vanilla_layers(self, layers, h, position, earlier):
        for layer in layers:
            memory = {}
            for i in range(len(h)):
                self.own_depth(layer, h[i], i, position, earlier, memory)

    def autoregressive(self, row, doc):
        position, earlier = self.places(doc, first=0)
        memory = [{} for _ in range(self.L)]
        h = [[self.embed(token)] for token in row]
        for i in range(len(row)):
            for layer, s in enumerate(self.reads):
                if s == layer:
                    self.own_depth(layer, h[i], i, position, earlier, memory[layer])
                else:
                    h[i].append(self.attend_and_mlp(layer, h[i][-1], position[i],
                                                    [memory[s][j] for j in earlier[i]]))
        return [h]

    def sweeps(self, row, doc, groups, n_nograd, n_grad):
        """Layers low..source in passes; those below before them, those above after them, once."""
        position, earlier = self.places(doc, first=0)
        tokens = range(len(row))
        below = [[self.embed(token)] for token in row]
        self.vanilla_layers(range(self.low), below, position, earlier)
        z = [states[-1] for states in below]  # what enters the source layer; at first the slice
        middle = [None for _ in tokens]
        for t in range(n_nograd + n_grad):
            with torch.set_grad_enabled(t >= n_nograd):
                if t > 0 and t == n_nograd:
                    z = [x.detach() for x in z]
                for group in groups:
                    memory = {j: self.own_keys_values(self.source, z[j], position[j])
                              for j in tokens}
                    new = {i: [below[i][-1]] for i in group}
                    for layer in range(self.low, self.source):
                        for i in group:
                            new[i].append(self.attend_and_mlp(
                                layer, new[i][-1], position[i], [memory[j] for j in earlier[i]]))
                    for i in group:
                        z[i] = new[i][-1]
                        self.own_depth(self.source, new[i], i, position, earlier, memory)
                        middle[i] = new[i]
        h = [[*below[i], *middle[i][1:]] for i in tokens]
        self.vanilla_layers(range(self.source + 1, self.L), h, position, earlier)
        return [h]


class NoFeedback(Oracle):
    def channel(self, layer, sources, position):
        """Channel `layer`, of sources 0..layer."""
        out = []
        for branch in ("key", "value"):
            out.append(self.split_heads(self.mixed(branch, layer, sources)))
        gain = self.p["kv_pool.key_norm"][layer]
        return [rope(rms_norm(head, gain), position) for head in out[0]], out[1]

    def mixed(self, branch, layer, sources):
        def w(name):
            return self.p[f"kv_pool.{branch}.{name}"]

        assert len(sources) == layer + 1
        normed = [rms_norm(sources[s], w("pre_norm")[s]) for s in range(layer + 1)]
        alpha = w("bias")[layer]
        if self.config.router == "dynamic":
            n_slots = w("router").shape[1] // self.config.n_embd
            slots = []
            for n in range(n_slots):  # the last slot is source `layer`
                s = layer - self.config.router_stride * (n_slots - 1 - n)
                slots.append(normed[s] if s >= 0 else torch.zeros_like(normed[0]))
            alpha = (w("router") @ torch.cat(slots)).reshape(self.L, self.L)[layer] + alpha
        mixture = sum(alpha[s] * normed[s] for s in range(layer + 1))
        return w("proj")[layer] @ rms_norm(mixture, w("post_norm")[layer], eps=1e-4)

    def one_pass(self, row, doc):
        position, earlier = self.places(doc, first=1 if self.config.dummy else 0)
        h = [[self.embed(token)] for token in row]
        for layer in range(self.L):
            memory = [self.channel(layer, states, p) for states, p in zip(h, position)]
            dummy = []
            if self.config.dummy:
                dummy = [self.channel(layer, [self.p["kv_pool.dummy"]] * (layer + 1), 0)]
            for i, states in enumerate(h):
                states.append(self.attend_and_mlp(layer, states[-1], position[i],
                                                  dummy + [memory[j] for j in earlier[i]]))
        return [h]


class FusedKV(Oracle):
    def one_pass(self, row, doc):
        position, earlier = self.places(doc, first=0)
        h = [[self.embed(token)] for token in row]
        stored = []
        for layer in range(self.L):
            if layer < self.L // 2:
                stored.append([self.own_keys_values(layer, states[-1], p)
                               for states, p in zip(h, position)])
                memory = stored[layer]
            else:
                memory = [self.fused(layer - self.L // 2, bottom, middle)
                          for bottom, middle in zip(stored[0], stored[-1])]
            for i, states in enumerate(h):
                states.append(self.attend_and_mlp(layer, states[-1], position[i],
                                                  [memory[j] for j in [*earlier[i], i]]))
        return [h]

    def fused(self, n, bottom, middle):
        """K_i = a_i1 K_1 + a_in K_n per feature, the rotary pair (m, m + d/2) alike; V_i too."""
        keys, values = [], []
        for head in range(self.Hkv):
            a, b = self.p["fuse_key"][n, :, head]
            a, b = torch.cat((a, a)), torch.cat((b, b))
            keys.append(a * bottom[0][head] + b * middle[0][head])
            a, b = self.p["fuse_value"][n, :, head]
            values.append(a * bottom[1][head] + b * middle[1][head])
        return keys, values


class FusedKVLite(FusedKV):
    def fused(self, n, bottom, middle):
        return middle[0], bottom[1]
