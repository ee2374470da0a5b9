"""Options `--plot` and `--live` of the demo and the replay."""

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
    """Return the one line with which a command is refused before anything runs."""
    for run in ("pagecore.serving.replay.replay", "pagecore.serving.demo.demo"):
        monkeypatch.setattr(run, lambda *arguments: pytest.fail("the command ran"))
    return refused(capsys, *argv)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "name"), [("demo", "run.png"), ("replay", "run")], indirect=["command"])
def test_a_picture_is_written_to_the_given_path(capsys, tmp_path, command, name):
    code, _, err = call(capsys, *command, "--plot", tmp_path / name)
    assert (code, err) == (0, "")
    assert (tmp_path / name).read_bytes().startswith(PNG)


def test_a_replay_that_serves_no_request_still_has_its_picture(capsys, tmp_path, trace):
    code, _, err = call(capsys, "replay", trace, "--blocks", 2, "--plot", tmp_path / "run.png")
    assert code == 2
    assert "8 requests were refused" in err
    assert (tmp_path / "run.png").read_bytes().startswith(PNG)


def test_a_picture_that_cannot_be_written_is_refused_before_the_run(capsys, monkeypatch, tmp_path, command):
    assert "--plot" in refused_before_the_run(capsys, monkeypatch, *command, "--plot", tmp_path)
    assert "is a folder" in refused_before_the_run(capsys, monkeypatch, *command, "--plot", tmp_path)
    assert "does not exist; create it first" in refused_before_the_run(
        capsys, monkeypatch, *command, "--plot", tmp_path / "no" / "run.png"
    )
    assert "use a name that ends in .png" in refused_before_the_run(
        capsys, monkeypatch, *command, "--plot", tmp_path / "run.svg"
    )


def test_a_disk_that_fills_up_prints_one_line_without_a_traceback(capsys, monkeypatch, tmp_path, command):
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
    assert "--plot needs matplotlib, which is not installed; run pip install 'pagecore[cli]'" in message
    assert not (tmp_path / "run.png").exists()


def test_without_plot_nothing_is_recorded_and_matplotlib_is_not_imported(capsys, monkeypatch, command):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(
        "pagecore.serving.pictures.timeline.Timeline.__call__", lambda *_: pytest.fail("a step was recorded")
    )
    assert call(capsys, *command)[0] == 0
    assert "matplotlib" not in sys.modules


def test_live_shows_nothing_without_a_terminal(capsys, command):
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
