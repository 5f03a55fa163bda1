"""
Command lines: `python SCRIPT.py [config.py] --key=value ...` over a dataclass of defaults.

A config file is Python, run in a namespace of its own; what it leaves there must be known keys
(modules, functions, classes and names that start with an underscore are its own business).
`--key=value`, or `--key value`, overrides the file, the file overrides the defaults, in whatever
order they stand. `run` turns every end that a user can mend into one line on stderr and status 1:
a `UserError`, no memory, a full disk, no compiler.
"""

import __future__

import contextlib
import dataclasses
import difflib
import errno
import importlib
import inspect
import math
import os
import sys
import types
import typing
from pathlib import Path

# Scripts import this file before torch, which reads it: on a busy machine threads that spin while
# they wait for one that is not scheduled take its processor. (On two cores a step of config/tiny.py
# takes 0.6 s, and 1.2 beside one busy process; by 10,000 rounds 0.6 and 3.3.)
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "1000"

KINDS = {bool: "true or false", int: "a whole number of 63 bits", float: "a number", str: "text"}
BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "annot allocate memory",
             "CUBLAS_STATUS_ALLOC_FAILED", "Storage size calculation overflowed")
NO_COMPILER = ("InvalidCxxCompiler", "No working C++ compiler", "Failed to find C compiler",
               "Compiler: cl is not found")
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
PATH = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
# the settings that were parsed last, for advice, and the stream for JSON: see `run`
session = types.SimpleNamespace(settings=None, answers=None)


class UserError(Exception):
    """Something that the user can mend: what is wrong, the value, what is accepted."""


def key(default, help: str, was: str | None = None, of: tuple[str, str] | None = None):
    """A field of a dataclass of settings, with what --help says about it.

    `was`: its former name. `of`: another field and a value of it for which this one has another
    default; what a config file says of this one does not survive a change from or to that value by
    a later file or the command line.
    """
    return dataclasses.field(default=default, metadata={"help": help, "was": was, "of": of})


def ranks() -> tuple[int, int, int]:
    """RANK, WORLD_SIZE and LOCAL_RANK, which torchrun sets; 0, 1, 0 without it. UserError."""
    try:
        rank, world, local = (int(os.environ.get(name, default)) for name, default in
                              (("RANK", -1), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    except ValueError as error:
        raise UserError(f"RANK, WORLD_SIZE, LOCAL_RANK: whole numbers are needed ({error})"
                        ) from None
    if rank >= world or rank < 0 and world > 1:
        raise UserError(f"WORLD_SIZE={world}, {'no RANK' if rank < 0 else f'RANK={rank}'}: "
                        "torchrun sets both; for one process, unset both")
    return max(rank, 0), world, local


def package(name: str, lacking: str):
    """An optional package. Raises UserError, which says `lacking`, where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(lacking) from None


def run(main, argv: list[str] | None = None):
    """Call main(argv); what the user can mend becomes one line on stderr and exit status 1.

    Of several processes rank 0 prints it, and others what may have happened to them alone: the
    first one of each node, and any that has found the others.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))
        if hasattr(getattr(sys, name), "reconfigure"):  # a terminal of ASCII alone prints ?
            getattr(sys, name).reconfigure(errors="replace")
    session.answers = None
    try:
        main(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `| head` closed our output
        let_go(sys.stdout)
        sys.exit(1)
    except Exception as error:
        said = explained(error)
        if said is None:
            raise
        complain(said)
        sys.exit(1)


def explained(error: Exception) -> str | None:
    """What to say of an error that the user can mend; None for any other."""
    text = " ".join(str(error).split())
    if isinstance(error, UserError):
        return str(error)
    if no_memory(error):
        return f"out of memory: {less_memory(session.settings)}"
    if any(words in f"{type(error).__name__} {text}" for words in NO_COMPILER):
        return "torch.compile finds no C++ compiler here; --compile=false goes without it"
    if "No usable temporary directory" in text:  # torch looks for one
        return f"{text} (is the disk full?)"
    if isinstance(error, OSError) and error.errno in DISK:
        return f"{error.filename or 'stdout'}: cannot be written ({error.strerror})"
    if isinstance(error, OSError) and error.errno in PATH and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return None


def no_memory(error: Exception) -> bool:
    """Whether that is what an error means; on a CPU torch has no kind of its own for it."""
    return isinstance(error, MemoryError) or isinstance(error, (RuntimeError, OSError)) and any(
        words in str(error) for words in NO_MEMORY)


def less_memory(c) -> str:
    """Settings that need less than `c`: first those that change nothing but the time."""
    batch = getattr(c, "batch_size", None) or 1
    steps, T = getattr(c, "gradient_accumulation_steps", None), getattr(c, "block_size", None)
    advice = []
    if batch > 1:
        p = next(p for p in range(2, batch + 1) if batch % p == 0)
        more = f" --gradient_accumulation_steps={steps * p}" if steps else ""
        advice.append(f"--batch_size={batch // p}{more} takes less for the same result")
    elif T and T > 1:
        advice.append(f"--block_size={T // 2} takes less")
    for name in ("num_samples", "max_new_tokens"):  # there is room for all tokens from the start
        if (n := getattr(c, name, None) or 1) > 1:
            advice.append(f"--{name}={n // 2} takes less")
    return "; otherwise ".join(advice + ["a smaller model, shorter texts, or another device"])


def complain(said: str):
    """One line on stderr, by the process whose business it is."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    group = sys.modules.get("torch.distributed")
    together = group is not None and group.is_available() and group.is_initialized()
    rank = os.environ.get("RANK", "0")
    with contextlib.suppress(OSError):  # stderr may be closed, or its disk full
        if together or "0" in (rank, os.environ.get("LOCAL_RANK", "0")):
            who = "error" if rank == "0" else f"error (rank {rank})"
            print(f"{who}: {said}", file=sys.stderr, flush=True)
    let_go(sys.stdout)


def let_go(stream):
    """What is still in the buffer of a stream that takes no more must not fail at the end."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def run_command(program: str, commands: dict, argv: list[str], usage: str):
    """Call the command that argv begins with, one of the functions in {function: defaults of its
    settings}, with the settings that the rest gives. Its docstring is its help. Raises UserError.

    With --json=- all that it prints goes to stderr, and stdout, as `session.answers`, is for the
    JSON alone. Where nobody reads stdout any more, a command ends, and writes no JSON either.
    """
    functions = {f.__name__.removesuffix("_command"): f for f in commands}
    if argv and argv[0] in ("-h", "--help"):
        print(usage.strip() + "\n\ncommands: " + ", ".join(functions))
        return
    if not argv or argv[0] not in functions:
        raise UserError(f"{argv[0] + ': unknown' if argv else 'no'} command; choose one of "
                        f"{', '.join(functions)}")
    function = functions[argv[0]]
    about = f"{program} {argv[0]}: {inspect.getdoc(function)}"
    c = parse(commands[function], argv[1:], about)
    alone = getattr(c, "json", None) == "-"
    session.answers = sys.stdout if alone else None
    with contextlib.redirect_stdout(sys.stderr if alone else sys.stdout):
        function(c)


def parse(defaults, argv: list[str], usage: str):
    """Return a copy of the dataclass `defaults` with the config file and overrides of argv, whose
    keys its attribute `given` has, with True for those of argv itself.

    `usage` is the text that --help prints above the list of keys. Raises UserError.
    """
    if any(arg in ("-h", "--help") for arg in argv):
        print(usage.strip() + "\n\n" + describe(defaults), flush=True)
        sys.exit(0)
    types_of = typing.get_type_hints(type(defaults))
    from_files, overrides = {}, {}
    for arg in joined(argv, defaults):
        if not arg.startswith("--"):
            later = read_config_file(arg, defaults)
            drop_dependants(from_files, later, defaults)
            from_files.update(later)
            continue
        key, sep, text = arg[2:].partition("=")
        key = key.replace("-", "_")
        if key not in types_of:
            raise UserError(unknown(key, defaults, f"--{key}"))
        if not sep and is_boolean(types_of[key]):
            text = "true"
        elif not sep and key == "json":
            text = "-"  # stdout
        elif not sep:
            raise UserError(f"--{key} needs a value: --{key}={show(getattr(defaults, key))}")
        overrides[key] = convert(text, types_of[key], f"--{key}={text}")
    drop_dependants(from_files, overrides, defaults)
    session.settings = dataclasses.replace(defaults, **(from_files | overrides))
    session.settings.given = dict.fromkeys(from_files, False) | dict.fromkeys(overrides, True)
    return session.settings


def drop_dependants(settings: dict, later: dict, defaults):
    """Of settings, drop those that go with another (`of`) which `later` changes from or to the
    value that has defaults of its own."""
    for f in dataclasses.fields(defaults):
        owner, own = f.metadata.get("of") or (None, None)
        if owner and owner in later:
            now = settings.get(owner, getattr(defaults, owner))
            if later[owner] != now and own in (later[owner], now):
                settings.pop(f.name, None)


def at_least(least: int, c, *names: str):
    """Raise UserError for a setting that is smaller, infinite or no number; None is welcome."""
    for name in names:
        value = getattr(c, name)
        if value is not None and not least <= value < math.inf:
            raise UserError(f"{name}={value}: at least {least} is needed")


def no_tilde(c):
    """Raise UserError for a folder that would be called ~: shells expand none behind an =."""
    for name in ("out_dir", "shard_dir"):
        given = getattr(c, name, "")
        if (meant := os.path.expanduser(given)) != given:
            raise UserError(f"{name}={given}: write {meant}")


def joined(argv: list[str], defaults) -> list[str]:
    """argv with each `--key value` written `--key=value`; a boolean needs no value."""
    kinds, out, rest = typing.get_type_hints(type(defaults)), [], list(argv)
    while rest:
        arg = rest.pop(0)
        kind = kinds.get(arg[2:].replace("-", "_")) if arg.startswith("--") else None
        if kind is not None and rest and not rest[0].startswith("--") and (
                not is_boolean(kind) or rest[0].lower() in (*BOOLEANS, "none")):
            arg = f"{arg}={rest.pop(0)}"
        out.append(arg)
    return out


def is_boolean(kind) -> bool:
    return bool in (kind, *typing.get_args(kind))


def read_text(path: str, setting: str) -> str:
    try:
        # without a mark of the byte order, with its own line ends
        return Path(path).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{setting}: cannot read this file as UTF-8 text ({error})") from None


def read_config_file(path: str, defaults) -> dict:
    """The settings of a Python config file. Raises UserError with the file's name."""
    types_of = typing.get_type_hints(type(defaults))
    if not Path(path).is_file():
        raise UserError(f"{path}: no such config file (settings are written --key=value)")
    code, names = read_text(path, path), {"__file__": path}
    try:
        exec(compile(code, path, "exec"), names)
    except Exception as error:
        line = getattr(error, "lineno", None) or getattr(error.__traceback__.tb_next, "tb_lineno",
                                                         "?")
        raise UserError(f"{path}, line {line}: {type(error).__name__}: {error}") from None
    settings = {}
    for key, value in names.items():
        if key.startswith("_") or isinstance(value, (types.ModuleType, __future__._Feature)) or (
                callable(value) and key not in types_of):
            continue
        if key not in types_of:
            raise UserError(unknown(key, defaults, f"{path}: {key}"))
        settings[key] = convert(value, types_of[key], f"{path}: {key} = {value!r}")
    return settings


def unknown(key: str, defaults, where: str) -> str:
    for f in dataclasses.fields(defaults):
        if f.metadata.get("was") == key:
            return f"{where}: {key} is {f.name} now: {f.metadata['help']}"
    near = difflib.get_close_matches(key, [f.name for f in dataclasses.fields(defaults)], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{where}: unknown setting {key}{hint} (--help lists all)"


def convert(value, kind, where: str):
    """`value`, text or a Python object, as `kind`; ints are floats too, nothing else bends."""
    several = typing.get_origin(kind) in (types.UnionType, typing.Union)  # X | None
    kind, *none = typing.get_args(kind) if several else (kind,)
    if kind not in KINDS or none not in ([], [types.NoneType]):
        kinds = ", ".join(k.__name__ for k in KINDS)
        raise UserError(f"{where}: a key is of {kinds}, or of one of these or None; a list is "
                        "text, to be split where it is used")
    if none and (value in (None, "None") or value == "none" and kind is not str):
        return None
    if kind is bool and str(value).lower() in BOOLEANS:
        return BOOLEANS[str(value).lower()]
    if kind is str and isinstance(value, str):
        return value
    if kind in (int, float) and not isinstance(value, bool) and isinstance(value, (kind, str, int)):
        with contextlib.suppress(ValueError, OverflowError):
            number = kind(value)
            if kind is float or abs(number) < 2**63:  # more do not fit where they go, such as seeds
                return number
    raise UserError(f"{where}: expected {KINDS[kind]}{' or None' if none else ''}")


def show(value) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if text.isprintable() else repr(text)


def describe(defaults) -> str:
    """Every key with its default and, where the field has it, its meaning."""
    settings = {f"--{f.name}={show(getattr(defaults, f.name))}": f.metadata.get("help", "")
                for f in dataclasses.fields(defaults)}
    return "\n".join(f"  {setting:40s} {help}".rstrip() for setting, help in settings.items())
