"""Model folders that are meant to break what reads them: each is refused in one sentence, at once."""

import json
import resource
import struct
from pathlib import Path
from typing import Any

import pytest

from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ParameterSpec
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import read_shape, weight_files
from tests.flows.checked_files import LLAMA
from tests.rlhf_tasks.config.test_hostile_config import said

DEEP = "[" * 100_000

CONFIGS = {
    "a list": ("[]", "config.json: expected a JSON object, found list."),
    "nested": (f'{{"a": {DEEP}', "config.json: not valid JSON: nested too deeply."),
    "a long number": (
        f'{{"a": {"9" * 6000}}}',
        "config.json: not valid JSON: Exceeds the limit (4300 digits)",
    ),
    "layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 in its config is more than 4,096"),
    "hidden size": (
        {"hidden_size": 10**12},
        "hidden_size=1000000000000 in its config is more than 1,048,576",
    ),
    "vocabulary": ({"vocab_size": 10**12}, "vocab_size=1000000000000 in its config is more than"),
    "a kind that is a list": ({"model_type": []}, "has model_type [], which is not a decoder"),
    "a kind that is long": ({"model_type": "x" * 10**6}, "which is not a decoder"),
    "rope": ({"rope_scaling": {"type": {}}, "rope_parameters": {"type": [1]}}, "has rope_type [1]"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", CONFIGS)
def test_a_hostile_config_is_refused(tmp_path: Path, case: str):
    content, sentence = CONFIGS[case]
    text = content if isinstance(content, str) else json.dumps({**LLAMA, **content})
    (tmp_path / "config.json").write_text(text)
    assert sentence in said(read_shape, tmp_path)


TWO = {
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]},
}
SPECS = [ParameterSpec("a", (2, 2), "first"), ParameterSpec("b", (2,), "first")]


def stored(path: Path, header: Any, length: int | None = None, data: bytes = bytes(24)) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def changed(**changes: Any) -> dict[str, Any]:
    """TWO, in which "b" is another; a key that is None is left out."""
    return {"a": TWO["a"], "b": {k: v for k, v in {**TWO["b"], **changes}.items() if v is not None}}


HEADERS = {
    "without a shape": (changed(shape=None), "'shape' is not there"),
    "without offsets": (changed(data_offsets=None), "'data_offsets' is not there"),
    "short offsets": (
        changed(data_offsets=[16, 20]),
        "'b' has 8 bytes from byte 16 on by dtype and shape, but",
    ),
    "one offset": (changed(data_offsets=[16]), "not enough values to unpack"),
    "overlapping offsets": (changed(data_offsets=[8, 16]), "but its data_offsets are 8 and 16"),
    "a gap": (changed(data_offsets=[20, 28]), "but its data_offsets are 20 and 28"),
    "negative offsets": (changed(data_offsets=[-8, 0]), "'b' has the shape [2] and the offsets -8, 0"),
    "an unknown dtype": (changed(dtype="F31"), "'b' has the unknown dtype 'F31'"),
    "a list for a dtype": (changed(dtype=[]), "unhashable"),
    "a shape of text": (changed(shape=["2"]), "'b' has the shape ['2'] and the offsets 16, 24"),
    "a huge shape": (changed(shape=[2**61] * 8), "bytes from byte 16 on"),
    "a shape that is a number": (changed(shape=2), "has no len()"),
    "a million dims": (changed(shape=[2**61] * 10**6), "'b' has the shape [23058"),
    "a quantised parameter": (changed(dtype="I32"), "b has dtype I32, not one of F64, F32, F16, BF16."),
    "a list": ([], "not valid safetensors"),
    "nested": (DEEP.encode(), "nested too deeply"),
    "no JSON": (b"\xff" * 30, "not valid safetensors"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", HEADERS)
def test_a_hostile_header_of_weights_is_refused(tmp_path: Path, case: str):
    header, sentence = HEADERS[case]
    stored(tmp_path / "model.safetensors", header)
    found = said(weight_files, tmp_path, SPECS, True)
    assert found.startswith(str(tmp_path / "model.safetensors"))
    assert sentence in found


def test_a_sound_header_is_read(tmp_path: Path):
    stored(tmp_path / "model.safetensors", {"__metadata__": {"format": "pt"}, **TWO})
    assert set(weight_files(tmp_path, SPECS, True)) == {"a", "b"}


def test_bytes_that_no_tensor_has_are_refused(tmp_path: Path):
    stored(tmp_path / "model.safetensors", TWO, data=bytes(25))
    assert "has 1 bytes more than its header names" in said(weight_files, tmp_path, SPECS, True)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("length", [8 << 30, (1 << 64) - 1, 10_000])
def test_a_header_larger_than_its_file_is_not_read(tmp_path: Path, length: int):
    """The file is sparse and as large as it says, but for the last: nothing of that size may be held."""
    path = tmp_path / "model.safetensors"
    stored(path, TWO, length)
    if length == 8 << 30:
        with path.open("r+b") as file:
            file.truncate(length + 100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert f"its first bytes announce a header of {length:,} bytes" in said(
        weight_files, tmp_path, SPECS, True
    )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize(
    ("weight_map", "sentence"),
    [
        ({"a": "../model.safetensors"}, "names '../model.safetensors', which is not a plain file name"),
        ({"a": "/etc/passwd"}, "names '/etc/passwd', which is not a plain file name"),
        ({"a": 1}, "has no weight_map {parameter: file}"),
        ({"a": "x" * 5000}, "names files that are not there: xxx"),
        ({"a": "\0"}, "names files that are not there"),
    ],
)
def test_a_hostile_index_is_refused(tmp_path: Path, weight_map: Any, sentence: str):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert sentence in said(weight_files, tmp_path, SPECS, True)
