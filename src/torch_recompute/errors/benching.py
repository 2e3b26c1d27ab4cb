"""Texts for what `torch-recompute bench run` is asked and cannot do."""

from __future__ import annotations

from collections.abc import Sequence


def no_model_to_run() -> str:
    """Text for a comparison of nothing."""
    return (
        "bench run needs a MODEL: on the command line, or as model: in the file of --sweep. Write for example "
        "torch-recompute bench run gpt-tiny"
    )


def not_one_of(option: str, value: object, known: Sequence[str]) -> str:
    """Text for a word that is not among those that an option takes."""
    return f"{option} is {value}; expected one of {', '.join(known)}. Write for example {option} {known[0]}"


def not_a_percentage(option: str, value: object) -> str:
    """Text for a share that is none."""
    return f"{option} is {value}; expected a number of percent, 0 or more, without a sign. Write for example {option} 5"


def bad_capacity(value: object) -> str:
    """Text for a capacity that is not a number of bytes."""
    return f"--capacity is {value}; expected the bytes that there are. Write for example --capacity 2GiB"


def no_capacity_here(system: str) -> str:
    """Text for a limit that the system does not keep."""
    return (
        f"--capacity limits a process's memory on a CPU by Linux's RLIMIT_DATA, and this system is {system}. Leave it "
        "out, or write --device cuda, where the allocator keeps to it."
    )


def no_device_here(device: str, version: str) -> str:
    """Text for a device that torch does not see."""
    return f"--device is {device}, but torch {version} sees no such device here. Write --device cpu"


def two_settings(where: str, one: str, other: str) -> str:
    """Text for two ways at once of saying what is recomputed."""
    place = f"{where}: " if where else ""
    return (
        f"{place}{one} and {other} both say what is recomputed. Leave one of them out: the recompute fields, budget "
        "and plan exclude each other."
    )


def in_the_sweep(option: str) -> str:
    """Text for a setting on the command line beside a file of them."""
    return (
        f"{option} says what is recomputed, and so does the file of --sweep. Make it an experiment in the file, or "
        "leave --sweep out."
    )


def cannot_read(option: str, path: str, why: str) -> str:
    """Text for a file that cannot be read."""
    return f"{option} is {path}: {why}. Write the path of a file that is there, and that may be read."


def bad_sweep(path: str, experiments: object) -> str:
    """Text for a file without a list of experiments."""
    has = "has no experiments" if experiments is None else f"has experiments: {experiments!r}"
    return (
        f"--sweep is {path}, which {has}; expected a list. Write for example:\n"
        "      experiments:\n"
        "        - name: every layer\n"
        "          recompute_granularity: full\n"
        "          recompute_method: uniform\n"
        "          recompute_num_layers: 1"
    )


def bad_experiment(where: str, why: str) -> str:
    """Text for an experiment that is none."""
    return (
        f"{where}: {why}. An experiment has a name of its own, and the fields of RecomputeConfig, or budget, or plan. "
        "The control, which recomputes nothing, is always there and has no entry."
    )


def unknown_key(where: str, key: object, nearest: str) -> str:
    """Text for a key that means nothing."""
    return f"{where}: {key!r} is not known, so it would have no effect; the nearest is {nearest!r}. Write {nearest}:"


def bad_golden(path: str, why: str) -> str:
    """Text for a file that holds no golden figures."""
    return (
        f"--golden is {path}: {why}. Write the path of a file that --save-golden has written, on the same kind of "
        "device."
    )


def golden_of_another(path: str, what: str, theirs: object, ours: object) -> str:
    """Text for golden figures that say nothing of this run."""
    return (
        f"the figures in {path} are of another {what}: {theirs}, here {ours}. A comparison would say nothing. Write "
        "figures of your own with --save-golden, or leave --golden out."
    )


def no_golden_figure(path: str, name: str, known: Sequence[str]) -> str:
    """Text for a setting that there is no figure for."""
    others = ", ".join(map(repr, known)) or "nothing"
    return (
        f"{path} has no figure for {name!r} and none for the control, only for {others}. "
        "Run it once with --save-golden, or leave --golden out."
    )


def not_a_journal(path: str, line: int, why: str) -> str:
    """Text for a file of results that is none."""
    return (
        f"--results is {path}, whose line {line} is no result of bench run ({why}). Write the path of another file, or "
        "--fresh to begin this one anew."
    )
