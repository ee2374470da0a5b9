"""Files of configs: paths that are read, and errors that name the file."""

import json
import os
import socket

import pytest

from pagecore.errors import UnsupportedOption
from pagecore.models import ConfigError, read_model_config, specs_from_config
from tests.models.published import PUBLISHED

LLAMA = PUBLISHED["llama-3-8b"]


def test_a_config_is_read_from_its_file_or_its_folder(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    for config in (file, str(file), tmp_path, str(tmp_path)):
        assert read_model_config(config) == read_model_config(LLAMA)


def test_messages_name_the_file(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | {"num_attention_heads": 0}))
    with pytest.raises(ConfigError) as caught:
        specs_from_config(tmp_path)
    assert str(caught.value).startswith(f"{file}: num_attention_heads is 0")
    file.write_text(json.dumps(LLAMA | {"model_type": "xlnet"}))
    with pytest.raises(UnsupportedOption) as refused:
        specs_from_config(file)
    assert str(refused.value).startswith(f"{file}: model_type")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[1, 2]", "expected a JSON object"),
        (b"null", "holds null"),
        (b"\xff\xfe\xff", "is not UTF-8 text"),
        (b"[" * 100_000, "is not JSON"),
        (b" " * ((1 << 24) + 1), "not the weights"),
    ],
)
def test_a_file_other_than_a_config_raises(tmp_path, text, reason):
    file = tmp_path / "config.json"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        specs_from_config(file)
    assert str(file) in str(caught.value)


def test_a_missing_file_raises(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json cannot be read: No such file"):
        specs_from_config(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: No such file"):
        specs_from_config(tmp_path)
    with pytest.raises(ConfigError, match=r"null (byte|character)"):
        specs_from_config("a\0b")


def test_a_file_without_permission_raises(tmp_path, monkeypatch):
    def forbidden(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", forbidden)
    with pytest.raises(ConfigError, match="Permission denied"):
        specs_from_config(tmp_path)


def test_a_fifo_a_device_and_a_socket_raise_without_blocking(tmp_path):
    fifo = tmp_path / "config.json"
    os.mkfifo(fifo)
    for path in (fifo, tmp_path):
        with pytest.raises(ConfigError, match=r"config\.json cannot be read: it is a FIFO; expected a regular file"):
            specs_from_config(path)
    with pytest.raises(ConfigError, match="/dev/zero cannot be read: it is a device"):
        specs_from_config("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        with pytest.raises(ConfigError, match="socket cannot be read"):
            specs_from_config(tmp_path / "socket")


def test_a_path_that_is_too_long_raises():
    with pytest.raises(ConfigError, match="File name too long"):
        specs_from_config("a" * 5000)


def test_the_line_of_a_json_error_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama",\n"vocab_size": }')
    with pytest.raises(ConfigError, match=r"config\.json is not JSON: .*line 2 column 15"):
        specs_from_config(tmp_path)


@pytest.mark.parametrize("config", [None, 7, b"config.json", [LLAMA], LLAMA.items()])
def test_other_types_than_paths_and_dicts_raise(config):
    with pytest.raises(ConfigError, match=r"pass the path of a config\.json, its folder, or a dict"):
        specs_from_config(config)
