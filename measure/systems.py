"""
Systems by short names, as the benches and pictures take them: vanilla, k16, static1, lckv4, ...
"""

import re
from dataclasses import replace

from baselines import SYSTEMS
from configurator import UserError
from model import SCHEDULES


def named(name: str, n_layer: int) -> dict:
    """The settings of a system of n_layer layers by its short name, such as k16, static1 or lckv4;
    LCKV's with its published schedule. Raises ValueError for a name that is no system's."""
    kind, number = re.fullmatch("(.*?)([0-9]*)", name).groups()
    if number and kind == "k":
        return dict(kv="whitematter", router="dynamic", n_channels=int(number))
    if number and kind == "static":
        return dict(kv="whitematter", router="static", n_channels=int(number))
    if number and kind == "lckv":
        groups, nograd, grad = SCHEDULES["lckv"]
        return dict(kv="lckv", lckv_w=int(number), n_groups=groups, n_nograd=nograd, n_grad=grad)
    if name in SYSTEMS and name not in ("whitematter", "lckv"):
        return dict(kv=name, n_channels=n_layer)
    raise ValueError("no system; choose vanilla, k16 (or another number of channels), static16, "
                     "lckv4 (or another w), nofeedback, feedback, recurrent, fusedkv, fusedkv_lite")


def named_configs(systems: str, sizes):
    """Copies of a config, ModelConfig or any with its names, by the short names of systems with
    commas between. Raises UserError for a name that is no system's, or settings that do not fit."""
    configs = {}
    for name in systems.split(","):
        try:
            configs[name] = replace(sizes, **named(name, sizes.n_layer))
        except ValueError as error:
            raise UserError(f"systems={systems}, {name}: {error}") from None
    return configs
