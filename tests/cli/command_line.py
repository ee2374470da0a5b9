"""Helpers that call the command in the test process."""

import json

from pagecore import cli


def call(capsys, *argv):
    """Run a command; return its exit code, stdout and stderr."""
    try:
        code = cli.main([str(part) for part in argv])
    except SystemExit as ended:
        code = ended.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys, *argv):
    """Run a command that must be refused; return its one line on stderr."""
    code, out, err = call(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("pagecore")
    assert err.count("\n") == 1
    return err


def write_trace(path, lines):
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path
