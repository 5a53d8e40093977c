"""Error messages that name settings of a config in place of the library's arguments."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from fedcodist.config.walk import settings_and_groups_of

# Beginning of a library's message -> the setting, for arguments whose settings have another name.
# At the beginning of a message, the first pattern that matches and whose setting is in the config (or
# has a star) counts. In argument=value, the first that matches counts. {} is for what its groups hold.
_SETTINGS = (
    (r"pools\['[^']+'\]\.poisson\.most\b", "training.privacy.most"),
    (r"pools\['[^']+'\]\.poisson\.cycle\b", "training.privacy.bands"),
    (r"cycle\b", "training.privacy.bands"),
    (r"(?:pools|levels)\['([^']+)'\]\.(\w+)", "pools.{}.{}"),
    (r"training\.privacy\.(?:adaptive|noise_multiplier)\.(\w+)", "training.privacy.{}"),
    (r"privacy\.(\w+)", "training.privacy.{}"),
    (r"privacy\.(\w+)", "algorithm.privacy.{}"),  # of parties
    (r"accountant\b", "training.privacy.accountant"),
    (r"teaching\['([^']+)'\]\.(\w+)", "pools.{}.teaching.{}"),
    (r"alpha\['([^']+)'\]", "pools.{}.alpha"),
    (r"fraction\['([^']+)'\]", "pools.{}.fraction"),
    (r"fraction\b", "pools"),
    (r"held_out_fraction\b", "data.held_out_share"),
    (r"(?:\w+\.)?inference_batch_size\b", "evaluation.batch_size"),
    (r"(?:teaching|hyper|adjustments)\.(\w+)", "algorithm.{}"),  # FedSDD's, HeteroFL's
    (r"(?:alignment|open_examples|public|answers)\.(\w+)", "algorithm.{}"),  # of parties and graphs
    (r"teaching\b", "pools.*.teaching.weight"),
    (r"patience\.(?:data\.)?(\w+)", "phases.*.{}"),
    (r"validation\.(\w+)", "algorithm.validation.{}"),
    (r"averaging\.start\b", "algorithm.average_from"),
    (r"averaging\.every\b", "algorithm.average_every"),
    (r"evaluate_every\b", "evaluation.every"),
    (r"evaluate_also\b", "evaluation.around"),
    (r"evaluate_clients\b", "evaluation.clients"),
    (r"checkpoint_every\b", "evaluation.checkpoint_every"),
    (r"evaluation_batch_size\b", "evaluation.batch_size"),
    (r"splits\b", "evaluation.splits"),
    (r"final_splits\b", "evaluation.final_splits"),
    (r"client_splits\b", "evaluation.client_splits"),
    (r"final_client_splits\b", "evaluation.final_client_splits"),
    (r"seeds_loop\b", "execution.seeds_loop"),
    (r"num_rounds\b", "rounds"),
    (r"(?:data: )?num_clients\b", "data.num_clients"),
    (r"option\b", "training.scaffold_option"),
    (r"hyper\.distillation_weight\b", "training.fed_gkd.weight"),
    (r"distillation\.(?:exchange\.)?(\w+)", "algorithm.{}"),
    (r"distillation\.batch_size", "algorithm.public_batch_size"),
)


def choice(setting: str, name: str, choices: Mapping[str, Any]) -> Any:
    """Returns the choice that a setting names; raises ValueError that lists the names."""
    if not isinstance(name, str) or name not in choices:
        raise ValueError(f"{setting} must be one of {sorted(choices)}, got {name!r}.")
    return choices[name]


@contextlib.contextmanager
def named(settings: str) -> Iterator[None]:
    """Puts `settings` before messages that begin with an argument, and before missing settings."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise type(error)(f"{settings}{error}") from None
    except AttributeError as error:
        # ConfigDict raises this where a setting is missing, with the last part of its name.
        is_missing = error.args and isinstance(error.args[0], KeyError)
        if not is_missing or not settings.endswith("."):
            raise
        name = str(error.args[0].args[0]).split("\n")[0].strip("'")
        raise ValueError(f"the config lacks '{settings}{name}'") from None


@contextlib.contextmanager
def as_settings(config: ConfigDict) -> Iterator[None]:
    """In messages that begin with an argument, puts the path of its setting in the argument's place."""
    try:
        yield
    except (ValueError, TypeError) as error:
        paths = {path for path, _ in settings_and_groups_of(config)}
        message = _with_settings(str(error), paths)
        if message == str(error):
            raise
        raise type(error)(message) from error
    except (AttributeError, KeyError) as error:
        if (path := _missing(error, config)) is None:
            raise
        raise ValueError(f"the config lacks '{path}'.") from error


def _with_settings(message: str, paths: set[str]) -> str:
    """The message with settings in place of arguments, at its beginning and in argument=value."""
    path, rest = _setting(message, paths)
    values = re.sub(r"\b[\w.]+(?==)", lambda match: _renamed(match.group(), paths), rest)
    return values if path is None else f"{path}{values}"


def _renamed(argument: str, paths: set[str]) -> str:
    """The argument's setting if it has another name than the argument, or else the argument."""
    for pattern, setting in _SETTINGS:
        if match := re.fullmatch(pattern, argument):
            path = setting.format(*match.groups())
            return path if path in paths else argument
    return argument


def _setting(message: str, paths: set[str]) -> tuple[str | None, str]:
    """The path of the setting that a message is about, and the rest of the message.

    The path is None where the message names a setting already, or where several settings could be meant.
    """
    start = re.match(r"[\w.]+(?=.)", message)
    if start is None or (start.group() in paths and message[start.end()] not in "[:"):
        return None, message
    for pattern, setting in _SETTINGS:
        if match := re.match(pattern, message):
            path = setting.format(*match.groups())
            if path in paths or "*" in path:
                return path, message[match.end() :]
    same_name = [path for path in paths if path.rpartition(".")[2] == start.group()]
    return (same_name[0], message[start.end() :]) if len(same_name) == 1 else (None, message)


def _missing(error: Exception, config: ConfigDict) -> str | None:
    """The path of a missing setting, of which ConfigDict reports the last part; None if unclear."""
    group = getattr(error, "obj", None)
    if group is None and (trace := error.__traceback__) is not None:
        while trace.tb_next is not None:
            trace = trace.tb_next
        group = trace.tb_frame.f_locals.get("self")  # of ConfigDict.__getitem__
    inner = error.args[0] if error.args and isinstance(error.args[0], KeyError) else error
    if not isinstance(inner, KeyError) or not inner.args:
        return None
    name = str(inner.args[0]).split("\n")[0].strip("'\"")
    if not isinstance(group, ConfigDict):
        return None
    if set(group) == set(config):  # the whole config, or a copy with a chunk size of its own
        return name
    groups = {p: v for p, v in settings_and_groups_of(config) if isinstance(v, ConfigDict)}
    # `execution` too may be a copy with a chunk size of its own.
    same_names = [path for path, value in groups.items() if set(value) == set(group)]
    same = [path for path in same_names if groups[path] == group]
    if not same and len(same_names) == 1:
        same = same_names
    return f"{same[0]}.{name}" if same else None
