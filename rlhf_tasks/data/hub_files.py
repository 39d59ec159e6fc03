"""Which files of a repository on a Hub a name means: a model's that are read, a data set's of a subset and split.

A data set's subsets and splits are those of its card (`configs` in the header of README.md) or else follow from the
names of its files and folders, by the rules of Hugging Face's `datasets`
(huggingface.co/docs/datasets/repository_structure). Pure; nothing is downloaded here.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from prefect_rlhf.rlhf_tasks.config.files import parse_yaml
from prefect_rlhf.rlhf_tasks.config.hub_names import HubName
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import (
    ADAPTER,
    ADAPTER_CONFIG,
    INDEX,
    SINGLE,
)
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, one_line, reading, shown

CARD = "README.md"
ENDS = ((".jsonl", ".jsonl.gz", ".parquet"), (".csv",), (".json",))
"""Ends of the names of files with rows; those of a kind only where there are none of the kinds before it: beside
Parquet files there are JSON files that describe them."""

_BESIDE = (".json", ".jinja", ".model")
_VOCABULARY = ("merges.txt", "vocab.txt")
_DEFAULT = "default"
_KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split -> the words in the names of its files or folders."""
_SHARD = re.compile(r"data/(?P<split>\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_SIDES = "[-._ 0-9]"  # what may stand before and after such a word
_NO_DATA = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
_HEADER = re.compile(r"\ufeff?---[ \t]*\n(.*?)^---", re.DOTALL | re.MULTILINE)
_OF_ROWS = re.compile(r"^dataset_info:[ \t]*\n(?:[ \t-].*\n|#.*\n|[ \t]*\n)*", re.MULTILINE)
"""Columns and sizes of every subset: of some cards megabytes, which take minutes to parse, and none is needed."""
_MOST_LISTED = 20

Splits = Mapping[str, Sequence[str]]
"""Split -> its files, in order."""


def header_of_card(card: str, where: Path | str) -> Mapping[str, Any]:
    """What the YAML at the start of a README.md says, without `dataset_info`; empty where there is none.

    Raises ConfigError, beginning with `where`, for what is not YAML.
    """
    header = _HEADER.match(card.replace("\r\n", "\n"))
    if header is None:
        return {}
    with reading(where, "not valid YAML") as place:
        stated = parse_yaml(_OF_ROWS.sub("", header[1]), place)
    return stated if isinstance(stated, dict) else {}


# --- models ---


def beside_weights(files: Iterable[str]) -> list[str]:
    """The files of a model that are read beside its weights: configuration, tokenizer, chat template, and the card,
    which names the license."""
    return sorted(
        file
        for file in files
        if "/" not in file
        and (file.endswith(_BESIDE) or file in (*_VOCABULARY, CARD))
        and (file == INDEX or not file.endswith(".index.json"))
    )


def weights_of(name: HubName, files: Iterable[str], index: Mapping[str, Any] | None) -> list[str]:
    """The files of a model's weights, by its index where it has one. Raises ConfigError where it has none."""
    files = set(files)
    if index is not None:
        shards = index.get("weight_map")
        named = set(shards.values()) if isinstance(shards, dict) else {None}
        if not all(isinstance(file, str) and file in files for file in named):
            raise ConfigError(
                f"{name.text}: its {INDEX} names files that it does not have. Choose another model."
            )
        return sorted(named)  # pyright: ignore[reportArgumentType]
    whole = next((file for file in (SINGLE, ADAPTER) if file in files), None)
    if whole is None:
        other = sorted(
            file for file in files if file.endswith((".bin", ".gguf", ".safetensors", ".pth", ".h5"))
        )
        has = f", but {one_line(', '.join(other[:4]))}" if other else ""
        raise ConfigError(
            f"{name.text}: {name.shown} has no {SINGLE}{has}. Choose one whose weights are safetensors in "
            "transformers' form."
        )
    return [whole]


def refuse_no_model(name: HubName, files: Iterable[str]) -> None:
    """Raises ConfigError where a repository has no model of transformers."""
    if not {"config.json", ADAPTER_CONFIG} & set(files):
        raise ConfigError(
            f"{name.text}: {name.shown} has no config.json. Choose a model in transformers' form."
        )


# --- data sets ---


def data_files(name: HubName, card: str, files: Sequence[str], preferred: Sequence[str]) -> list[str]:
    """The files of the rows that a name means, in order.

    card       the text of README.md; "" where there is none
    files      all that the repository has
    preferred  the splits that are meant where the name has none; empty: then it must have only one
    Raises ConfigError, with what there is, for a subset, split or glob that there is not.
    """
    if name.files is not None:
        return _matching(name, files)
    usable = [file for file in sorted(files) if file.endswith(sum(ENDS, ())) and not _is_hidden(file)]
    subsets = _subsets(name, card, [file for file in usable if PurePosixPath(file).name not in _NO_DATA])
    if not any(chosen for splits in subsets.values() for chosen in splits.values()):
        has = one_line(", ".join(sorted({PurePosixPath(file).suffix for file in files} - {"", ".md"})))
        raise ConfigError(
            f"{name.text}: {name.shown} has no JSONL, JSON, CSV or Parquet file{f' (it has {has})' if has else ''}, "
            "and code that a data set brings is never run. Choose another one, or convert it."
        )
    return list(_chosen(name, subsets, preferred))


def _matching(name: HubName, files: Sequence[str]) -> list[str]:
    assert name.files is not None
    wanted = _glob(name.files)
    matching = sorted(file for file in files if wanted.fullmatch(file))
    matching = matching or [f for f in sorted(files) if f.startswith(f"{name.files.rstrip('/')}/")]
    for ends in ENDS:
        if of_kind := [file for file in matching if file.endswith(ends)]:
            return of_kind
    raise ConfigError(
        f"{name.text}: no JSONL, JSON, CSV or Parquet file of {name.shown} matches {shown(name.files)}. It has "
        f"{_list([f for f in sorted(files) if f.endswith(sum(ENDS, ()))])}."
    )


def _chosen(name: HubName, subsets: Mapping[str, Splits], preferred: Sequence[str]) -> Sequence[str]:
    subset, split = name.parts if len(name.parts) == 2 else (None, name.parts[0] if name.parts else None)
    usual = _DEFAULT if _DEFAULT in subsets else next(iter(subsets)) if len(subsets) == 1 else None
    if subset is None and split in subsets and (usual is None or split not in subsets[usual]):
        subset, split = split, None
    subset = usual if subset is None else subset
    if subset is None or subset not in subsets:
        what = (
            "several subsets"
            if not name.parts
            else f"no subset{' or split' * (len(name.parts) == 1)} " + repr(name.parts[0])
        )
        raise ConfigError(
            f"{name.text}: {name.shown} has {what}. Write one of its subsets after a colon, as in "
            f"{name.id}:{next(iter(subsets))}: {_list(subsets)}."
        )
    splits = subsets[subset]
    if split is None:
        there = [each for each in splits if splits[each]]
        split = next((each for each in preferred if each in there), there[0] if len(there) == 1 else None)
    where = name.id if subset == _DEFAULT or len(subsets) == 1 else f"{name.id}:{subset}"
    if split is None:
        raise ConfigError(
            f"{name.text}: which split of {where} is meant? Write one after a colon, as in "
            f"{where}:{next(iter(splits))}: {_list(splits)}."
        )
    if not splits.get(split):
        others = f" It has the subsets {_list(subsets)}." if len(subsets) > 1 and not name.parts[1:] else ""
        raise ConfigError(
            f"{name.text}: {where} has no split {split!r}. Its splits are {_list([s for s in splits if splits[s]])}."
            f"{others}"
        )
    return splits[split]


def _list(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return one_line(", ".join(names[:_MOST_LISTED]), most=2000) + more if names else "none"


def _subsets(name: HubName, card: str, files: Sequence[str]) -> dict[str, Splits]:
    """Subset -> its splits, the default subset first."""
    configs = header_of_card(card, f"{name.text}: the card").get("configs")
    subsets: dict[str, Splits] = {}
    for config in configs if isinstance(configs, list) else ():
        if isinstance(config, dict) and isinstance(title := config.get("config_name", _DEFAULT), str | int):
            splits = _splits_of(config, files)
            subsets = {_DEFAULT: splits, **subsets} if config.get("default") is True else subsets
            subsets[str(title)] = splits
    return subsets or {_DEFAULT: _by_names(files)}


def _splits_of(config: Mapping[str, Any], files: Sequence[str]) -> Splits:
    """The splits of a subset, as an entry of `configs` has them."""
    folder = str(config.get("data_dir") or "").strip("./")
    below = f"{folder}/" if folder else ""
    inside = [file.removeprefix(below) for file in files if file.startswith(below)]
    stated = config.get("data_files")
    if stated is None:
        splits: Splits = _by_names(inside)
    else:
        if isinstance(stated, dict):
            entries = [{"split": split, "path": path} for split, path in stated.items()]
        else:
            entries = stated if isinstance(stated, list) else [stated]
        paths: dict[str, list[str]] = {}
        for entry in entries:
            split, path = (
                (entry.get("split"), entry.get("path")) if isinstance(entry, dict) else ("train", entry)
            )
            paths.setdefault(str(split), []).extend(map(str, path if isinstance(path, list) else [path]))
        splits = {split: _all_matching(patterns, inside) for split, patterns in paths.items()}
    return {split: [below + file for file in chosen] for split, chosen in splits.items()}


def _all_matching(patterns: Sequence[str], files: Sequence[str]) -> list[str]:
    """The files that match some pattern, in the patterns' order."""
    globs = [_glob(pattern.removeprefix("./")) for pattern in patterns]
    return list(dict.fromkeys(file for glob in globs for file in files if glob.fullmatch(file)))


def _by_names(files: Sequence[str]) -> Splits:
    """Split -> files, as their names and folders say: shards in `data/`, else words in names of folders, else those
    in names of files, else all for training."""
    shards = [(match["split"], file) for file in files if (match := _SHARD.fullmatch(file))]
    if shards:
        splits = list(dict.fromkeys([*(s for s in _KEYWORDS if s in dict(shards)), *sorted(dict(shards))]))
        return {split: [file for other, file in shards if other == split] for split in splits}
    for named in (r"(?:.*/)?(?:[^/]*{s})?{word}(?:{s}[^/]*)?/.*", r"(?:.*/)?(?:[^/]*{s})?{word}{s}[^/]*"):
        splits = {
            split: [
                file
                for file in files
                if any(re.fullmatch(named.format(s=_SIDES, word=word), file) for word in words)
            ]
            for split, words in _KEYWORDS.items()
        }
        if any(splits.values()):
            return {split: _of_one_kind(chosen) for split, chosen in splits.items() if chosen}
    return {"train": _of_one_kind(files)}


def _of_one_kind(files: Sequence[str]) -> list[str]:
    return next((of_kind for ends in ENDS if (of_kind := [f for f in files if f.endswith(ends)])), [])


def _is_hidden(file: str) -> bool:
    path = PurePosixPath(file)
    return any(part.startswith(".") for part in path.parts) or any(
        part.startswith("__") for part in path.parts[:-1]
    )


_WILD = re.compile(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])")
_MEANS = {"**/": r"(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def _glob(pattern: str) -> re.Pattern[str]:
    """A glob, in which ** goes through folders and nothing else does."""
    parts = _WILD.split(pattern)
    texts = (
        re.escape(part)
        if place % 2 == 0
        else _MEANS.get(part) or "[" + part[1:-1].replace("\\", "").replace("!", "^", part[1] == "!") + "]"
        for place, part in enumerate(parts)
    )
    try:
        return re.compile("".join(texts))
    except re.error:
        return re.compile(re.escape(pattern))
