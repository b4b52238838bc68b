"""What README says a reader can type, typed."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_python_in_the_readme_runs_in_order_and_says_what_it_should(capsys):
    program = "\n".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL))
    exec(compile(program, "README.md", "exec"), {})  # noqa: S102  our own text
    shown = capsys.readouterr().out
    assert "(4, 1536) True" in shown
    assert "bit-exact, deterministic" in shown
    assert "preference.backend" in shown


def test_every_command_in_the_readme_exists(capsys):
    from skuda.tools.cli import main

    commands = re.findall(r"^\$ skuda (.*?)(?:\s+#.*)?$", README, re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        assert main(command.split()) == 0, command
