"""`--plot` and `--live`, of the demo and of a replay."""

import functools
import importlib.util
import sys

import pytest

from pagecore.serving.demo import DemoConfig
from tests.capabilities import require
from tests.cli.command_line import call, refused

require("matplotlib")
PNG = b"\x89PNG\r\n"


@pytest.fixture(params=["demo", "replay"])
def command(request, trace, monkeypatch):
    monkeypatch.setattr("pagecore.serving.demo.DemoConfig", functools.partial(DemoConfig, num_requests=5))
    return ["demo"] if request.param == "demo" else ["replay", str(trace), "--blocks", "30"]


def refused_before_the_run(capsys, monkeypatch, *argv):
    """The one line that a command is refused with, before anything is run."""
    for run in ("pagecore.serving.replay.replay", "pagecore.serving.demo.demo"):
        monkeypatch.setattr(run, lambda *arguments: pytest.fail("it was run"))
    return refused(capsys, *argv)


@pytest.mark.parametrize("name", ["run.png", "run"])
def test_a_picture_is_written_where_it_is_wanted(capsys, tmp_path, command, name):
    code, _, err = call(capsys, *command, "--plot", tmp_path / name)
    assert (code, err) == (0, "")
    assert (tmp_path / name).read_bytes().startswith(PNG)


def test_a_replay_that_serves_nobody_still_has_its_picture(capsys, tmp_path, trace):
    code, _, err = call(capsys, "replay", trace, "--blocks", 2, "--plot", tmp_path / "run.png")
    assert code == 2
    assert "8 requests refused" in err
    assert (tmp_path / "run.png").read_bytes().startswith(PNG)


def test_a_picture_that_cannot_be_written_is_refused_before_the_run(capsys, monkeypatch, tmp_path, command):
    assert "--plot" in refused_before_the_run(capsys, monkeypatch, *command, "--plot", tmp_path)
    assert "is a folder" in refused_before_the_run(capsys, monkeypatch, *command, "--plot", tmp_path)
    assert "there is no folder" in refused_before_the_run(
        capsys, monkeypatch, *command, "--plot", tmp_path / "no" / "run.png"
    )
    assert "let the name end in .png" in refused_before_the_run(
        capsys, monkeypatch, *command, "--plot", tmp_path / "run.svg"
    )


def test_a_disk_that_fills_up_is_no_traceback(capsys, monkeypatch, tmp_path, command):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pagecore.serving.pictures.plot.save", full)
    code, _, err = call(capsys, *command, "--plot", tmp_path / "run.png")
    assert code == 2
    assert err == f"pagecore: --plot {tmp_path / 'run.png'} cannot be written: No space left on device\n"


def test_without_matplotlib_the_extra_is_named(capsys, monkeypatch, tmp_path, command):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    message = refused_before_the_run(capsys, monkeypatch, *command, "--plot", tmp_path / "run.png")
    assert "--plot needs matplotlib, which is not installed: pip install 'pagecore[cli]'" in message
    assert not (tmp_path / "run.png").exists()


def test_nothing_is_recorded_and_nothing_imported_where_no_picture_is_wanted(capsys, monkeypatch, command):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(
        "pagecore.serving.pictures.timeline.Timeline.__call__", lambda *_: pytest.fail("it was recorded")
    )
    assert call(capsys, *command)[0] == 0
    assert "matplotlib" not in sys.modules


def test_live_shows_nothing_where_there_is_no_terminal(capsys, command):
    code, out, err = call(capsys, *command, "--live")
    assert (code, err) == (0, "")
    assert "group 0" not in out


def test_live_shows_the_map_and_the_bars_on_a_terminal(capsys, monkeypatch, command):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("LINES", "30")
    code, out, err = call(capsys, *command, "--live")
    assert code == 0
    assert "group 0: " in err
    assert "blocks held" in err
    assert ("serving" if command == ["demo"] else "replaying") in err
    assert "group 0" not in out
