"""The command line as a whole: help, version, exit codes, errors in one line."""

from __future__ import annotations

import importlib.metadata

import pytest
from typer.testing import CliRunner

from forebay.cli.app import app


def commands(group=app, prefix=()):
    for info in group.registered_commands:
        yield (*prefix, info.name or info.callback.__name__.replace("_", "-"))
    for info in group.registered_groups:
        yield from commands(info.typer_instance, (*prefix, info.name))


def test_version(forebay):
    assert forebay("--version").out.strip() == f"forebay {importlib.metadata.version('forebay')}"


@pytest.mark.parametrize("command", list(commands()), ids=" ".join)
def test_every_command_has_help_and_json(command):
    done = CliRunner().invoke(app, [*command, "--help"])
    assert done.exit_code == 0
    assert "--json" in done.output


def test_unknown_command_is_a_usage_error(forebay):
    assert forebay("nothing").code == 2


def test_configuration_error_is_one_line(forebay):
    done = forebay("pool", "inspect", "absent.yaml")
    assert done.code == 2
    assert done.out == ""
    assert done.err == "error: absent.yaml: cannot be read (No such file or directory); give the path of a pool.yaml\n"


def test_errors_are_json_where_json_was_asked_for(forebay):
    done = forebay("pool", "inspect", "absent.yaml", "--json")
    assert done.code == 2
    assert done.data == {"ok": False, "error": done.err.removeprefix("error: ").strip()}


def test_device_error_is_a_problem_not_a_usage_error(forebay, tmp_path):
    (tmp_path / "ssd0.kv").write_text("somebody's letters")
    done = forebay("pool", "create", "pool.yaml")
    assert done.code == 1
    assert done.err.count("\n") == 1
    assert "ssd0.kv exists and is not a forebay device; give another path, or delete it" in done.err
    assert (tmp_path / "ssd0.kv").read_text() == "somebody's letters"
