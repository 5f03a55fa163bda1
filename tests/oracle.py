"""
The paper's equations, literally: one token, one layer, one channel, one head at a time.

Written from section 3 of the paper, in float64, and slow on purpose. It shares no code with
model.py, pool.py and solvers.py; all it takes from them are the names of the parameters. Every
schedule works on one row and returns a list with the states after each pass: `h[i][l]` is the
state (D,) of token i that enters layer l, `h[i][L]` the residual stream after the last block.
Gradients come from autograd on this file's own graph.
"""

import torch


def document_ids(row, eos_id):
    """An EOS token belongs to the document that it closes."""
    ids, current = [], 0
    for token in row:
        ids.append(current)
        if token == eos_id:
            current += 1
    return ids


def rms_norm(x, gain, eps=1e-6):
    return x / torch.sqrt((x * x).mean() + eps) * gain


def rope(x, position):
    """Half-split rotation of one head (d,); the angles are float32, as in Hugging Face's Qwen3."""
    half = x.numel() // 2
    exponent = torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half)
    angle = float(position) * (1.0 / 1e6 ** exponent)
    cos, sin = torch.cos(angle).to(x.dtype), torch.sin(angle).to(x.dtype)
    first, second = x[:half], x[half:]  # feature m turns together with feature m + d / 2
    return torch.cat((first * cos - second * sin, second * cos + first * sin))


def attention(query, entries):
    """One query head (d,) on a list of (key, value) entries: plain softmax, scale 1 / sqrt(d)."""
    if not entries:
        return torch.zeros_like(query)
    score = [(query * key).sum() / query.numel() ** 0.5 for key, _ in entries]
    weight = torch.softmax(torch.stack(score), 0)
    return sum(w * value for w, (_, value) in zip(weight, entries))


class Oracle:
    """`params`: the named parameters of a model (float64); `config`: its sizes."""

    def __init__(self, params, config):
        self.p = {name.removesuffix(".weight"): p for name, p in dict(params).items()}
        self.config = config
        self.L, self.k = config.n_layer, config.n_channels
        self.d, self.H, self.Hkv = config.head_dim, config.n_head, config.n_kv_head

    # -- the decoder block ------------------------------------------------------------------

    def split_heads(self, x):
        return [x[n * self.d:(n + 1) * self.d] for n in range(x.numel() // self.d)]

    def attend_and_mlp(self, layer, x, position, entries):
        """The block on one token; entries: (keys per kv head, values per kv head) per source."""
        def w(name):
            return self.p[f"blocks.{layer}.{name}"]

        queries = self.split_heads(w("q_proj") @ rms_norm(x, w("attn_norm")))
        heads = []
        for n in range(self.H):
            query = rope(rms_norm(queries[n], w("q_norm")), position)
            m = n // (self.H // self.Hkv)  # neighbouring query heads share a kv head
            heads.append(attention(query, [(keys[m], values[m]) for keys, values in entries]))
        x = x + w("o_proj") @ torch.cat(heads)
        a = rms_norm(x, w("mlp_norm"))
        gate = w("gate_proj") @ a
        return x + w("down_proj") @ (gate * torch.sigmoid(gate) * (w("up_proj") @ a))

    def own_keys_values(self, layer, x, position):
        """Vanilla: the layer's own projection of its own normed input."""
        def w(name):
            return self.p[f"blocks.{layer}.{name}"]

        a = rms_norm(x, w("attn_norm"))
        keys = self.split_heads(w("k_proj") @ a)
        keys = [rope(rms_norm(key, w("k_norm")), position) for key in keys]
        return keys, self.split_heads(w("v_proj") @ a)

    # -- section 3.1: the pool --------------------------------------------------------------

    def mixed_channels(self, branch, sources):
        """Steps 1 and 2 up to the projection, for one branch: L states (D,) -> k vectors (E,)."""
        def w(name):
            return self.p[f"kv_pool.{branch}.{name}"]

        L, k = self.L, self.k
        normed = [rms_norm(sources[s], w("pre_norm")[s]) for s in range(L)]
        alpha = w("bias").reshape(k * L)
        if self.config.router == "dynamic":
            inputs, s = [], L - 1  # every p-th source, counted down from L - 1 ...
            while s >= 0:
                inputs.insert(0, s)  # ... and concatenated in increasing order
                s -= self.config.router_stride
            alpha = w("router") @ torch.cat([normed[s] for s in inputs]) + alpha
        out = []
        for j in range(k):
            mixture = sum(alpha[j * L + s] * normed[s] for s in range(L))
            out.append(w("proj")[j] @ rms_norm(mixture, w("post_norm")[j], eps=1e-4))
        return out

    def pool(self, sources, position):
        """One token's L states -> per channel: (keys per kv head, values per kv head)."""
        channels = []
        for j, (key, value) in enumerate(zip(self.mixed_channels("key", sources),
                                             self.mixed_channels("value", sources))):
            gain = self.p["kv_pool.key_norm"][j]
            keys = [rope(rms_norm(head, gain), position) for head in self.split_heads(key)]
            channels.append((keys, self.split_heads(value)))
        return channels

    def dummy(self):
        """The dummy: its vector stands for the state at every source, at position 0."""
        return self.pool([self.p["kv_pool.dummy"]] * self.L, 0)

    # -- one token through the stack --------------------------------------------------------

    def embed(self, token):
        return self.p["embed"][token]

    def states(self, token, position, visible):
        """States of one token that reads the pooled tokens in `visible` (the dummy is one)."""
        h = [self.embed(token)]
        for layer in range(self.L):
            channel = layer % self.k
            entries = [channels[channel] for channels in visible]
            h.append(self.attend_and_mlp(layer, h[-1], position, entries))
        return h

    # -- section 3.3: the schedules ---------------------------------------------------------

    @staticmethod
    def places(doc, first):
        """Per token: its position in its document, and the earlier tokens of that document."""
        earlier = [[j for j in range(i) if doc[j] == doc[i]] for i in range(len(doc))]
        return [first + len(before) for before in earlier], earlier

    def vanilla(self, row, doc):
        position, earlier = self.places(doc, first=0)
        memory = [[] for _ in range(self.L)]
        h = []
        for i, token in enumerate(row):
            states = [self.embed(token)]
            for layer in range(self.L):
                memory[layer].append(self.own_keys_values(layer, states[-1], position[i]))
                entries = [memory[layer][j] for j in [*earlier[i], i]]
                states.append(self.attend_and_mlp(layer, states[-1], position[i], entries))
            h.append(states)
        return [h]

    def autoregressive(self, row, doc):
        position, earlier = self.places(doc, first=1)
        pooled, h = [], []
        for i, token in enumerate(row):
            visible = [self.dummy()] + [pooled[j] for j in earlier[i]]
            h.append(self.states(token, position[i], visible))
            pooled.append(self.pool(h[i][:self.L], position[i]))
        return [h]

    def jacobi(self, row, doc, n_nograd, n_grad):
        return self.sweeps(row, doc, [list(range(len(row)))], n_nograd, n_grad)

    def cyclic(self, row, doc, g, n_nograd, n_grad):
        groups = [[i for i in range(len(row)) if i % g == q] for q in range(g)]
        return self.sweeps(row, doc, groups, n_nograd, n_grad)

    def sweeps(self, row, doc, groups, n_nograd, n_grad):
        """Passes over the groups in order; the pool is evaluated afresh before every group."""
        position, earlier = self.places(doc, first=1)
        tokens = range(len(row))
        h = [[self.embed(token)] * (self.L + 1) for token in row]
        trace = []
        for t in range(n_nograd + n_grad):
            with torch.set_grad_enabled(t >= n_nograd):
                if t > 0 and t == n_nograd:  # what an earlier pass left is a constant
                    h = [[state.detach() for state in h[i]] for i in tokens]
                for group in groups:
                    pooled = [self.pool(h[i][:self.L], position[i]) for i in tokens]
                    dummy = self.dummy()
                    new = {i: self.states(row[i], position[i],
                                          [dummy] + [pooled[j] for j in earlier[i]])
                           for i in group}
                    h = [new.get(i, h[i]) for i in tokens]
            trace.append(h)
        return trace

    # -- the loss ---------------------------------------------------------------------------

    def loss(self, rows, targets):
        """Mean cross-entropy over the targets that are not -1; rows: final passes per row."""
        terms = []
        for h, row_targets in zip(rows, targets):
            for i, target in enumerate(row_targets):
                if target != -1:
                    logits = self.p["embed"] @ rms_norm(h[i][self.L], self.p["norm"])
                    terms.append(torch.logsumexp(logits, 0) - logits[target])
        return sum(terms) / len(terms)


def stack(rows):
    """States per row, token and layer -> (B, T, L + 1, D)."""
    return torch.stack([torch.stack([torch.stack(states) for states in h]) for h in rows])
