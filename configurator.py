"""
Command lines: `python SCRIPT.py [config.py] --key=value ...` over a dataclass of defaults.

A config file is Python, run in a namespace of its own; what it leaves there must be known keys
(modules, functions, classes and names that start with an underscore are its own business).
`--key=value` overrides the file, the file overrides the defaults, in whatever order they stand.
`UserError` is the one exception for people: `run` prints it, without a traceback, and exits with
status 1.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
import types
import typing
from pathlib import Path

BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class UserError(Exception):
    """Something that the user can mend: what is wrong, the value, what is accepted."""


def key(default, help: str):
    """A field of a dataclass of settings, with what --help says about it."""
    return dataclasses.field(default=default, metadata={"help": help})


def run(main, argv: list[str] | None = None):
    """Call main(argv); a UserError becomes one line on stderr and exit status 1.

    Of several processes rank 0 prints it, and others what may have happened to them alone: the
    first one of each node, and any that has found the others.
    """
    try:
        main(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        sys.stdout.flush()
        rank, group = os.environ.get("RANK", "0"), sys.modules.get("torch.distributed")
        together = group is not None and group.is_available() and group.is_initialized()
        if rank == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        elif together or os.environ.get("LOCAL_RANK") == "0":
            print(f"error (rank {rank}): {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `| head` closed our output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def run_command(commands: dict, argv: list[str], usage: str):
    """Call the command that argv begins with, a function of the rest. Raises UserError."""
    if argv and argv[0] in ("-h", "--help"):
        print(usage.strip() + "\n\ncommands: " + ", ".join(commands))
        return
    if not argv or argv[0] not in commands:
        raise UserError(f"{argv[0] + ': unknown' if argv else 'no'} command; choose one of "
                        f"{', '.join(commands)}")
    commands[argv[0]](["--json=-" if arg == "--json" else arg for arg in argv[1:]])


def parse(defaults, argv: list[str], usage: str):
    """Return a copy of the dataclass `defaults` with the config file and overrides of argv.

    `usage` is the text that --help prints above the list of keys. Raises UserError.
    """
    if any(arg in ("-h", "--help") for arg in argv):
        print(usage.strip() + "\n\n" + describe(defaults))
        sys.exit(0)
    types_of = typing.get_type_hints(type(defaults))
    from_files, overrides = {}, {}
    for arg in argv:
        if not arg.startswith("--"):
            from_files.update(read_config_file(arg, types_of))
            continue
        key, sep, text = arg[2:].partition("=")
        key = key.replace("-", "_")
        if key not in types_of:
            raise UserError(unknown(key, types_of, f"--{key}"))
        if not sep and bool in (types_of[key], *typing.get_args(types_of[key])):
            text = "true"
        elif not sep:
            raise UserError(f"--{key} needs a value: --{key}={show(getattr(defaults, key))}")
        overrides[key] = convert(text, types_of[key], f"--{key}={text}")
    return dataclasses.replace(defaults, **(from_files | overrides))


def read_config_file(path: str, types_of: dict) -> dict:
    """The settings of a Python config file. Raises UserError with the file's name."""
    if not Path(path).is_file():
        raise UserError(f"{path}: no such config file (settings are written --key=value)")
    try:
        code = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read this file as UTF-8 text ({error})") from None
    names: dict = {}
    try:
        exec(compile(code, path, "exec"), names)
    except Exception as error:
        line = getattr(error, "lineno", None) or getattr(error.__traceback__.tb_next, "tb_lineno",
                                                         "?")
        raise UserError(f"{path}, line {line}: {type(error).__name__}: {error}") from None
    settings = {}
    for key, value in names.items():
        if key.startswith("_") or isinstance(value, types.ModuleType) or callable(value):
            continue
        if key not in types_of:
            raise UserError(unknown(key, types_of, f"{path}: {key}"))
        settings[key] = convert(value, types_of[key], f"{path}: {key} = {value!r}")
    return settings


def unknown(key: str, types_of: dict, where: str) -> str:
    near = difflib.get_close_matches(key, types_of, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{where}: unknown setting {key}{hint} (--help lists all)"


def convert(value, kind, where: str):
    """`value`, text or a Python object, as `kind`; ints are floats too, nothing else bends."""
    accepts = [k for k in (typing.get_args(kind) or (kind,)) if k is not type(None)]
    optional = type(None) in typing.get_args(kind)
    if optional and (value is None or value in ("None", "none")):
        return None
    kind = accepts[0]
    if kind is bool:
        text = str(value).lower()
        if isinstance(value, (bool, int, str)) and text in BOOLEANS:
            return BOOLEANS[text]
    elif kind is str:
        if isinstance(value, str):
            return value
    elif isinstance(value, (kind, str, int)) and not isinstance(value, bool):
        try:
            number = kind(value)
            if kind is float or abs(number) < 2**63:  # more do not fit where they go, such as seeds
                return number
        except (ValueError, OverflowError):
            pass
    expected = {bool: "true or false", int: "a whole number of 63 bits", float: "a number",
                str: "text"}[kind]
    raise UserError(f"{where}: expected {expected}{' or None' if optional else ''}")


def show(value) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if text.isprintable() else repr(text)


def describe(defaults) -> str:
    """Every key with its default and, where the field has it, its meaning."""
    lines = []
    for f in dataclasses.fields(defaults):
        setting = f"--{f.name}={show(getattr(defaults, f.name))}"
        lines.append(f"  {setting:40s} {f.metadata.get('help', '')}".rstrip())
    return "\n".join(lines)
