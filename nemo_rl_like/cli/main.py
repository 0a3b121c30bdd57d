"""Entry point of `nrl`: errors that users meet become one message and an exit code, everything else a traceback.

Exit codes: 0 done; 1 failed; 2 spec, input or output folder wrong; 75 stopped by a signal after saving; 130 Ctrl-C.
"""

from __future__ import annotations

import sys

import typer

from nemo_rl_like.artifacts.errors import NrlError
from nemo_rl_like.artifacts.redaction import redacted
from nemo_rl_like.cli.app import app

CTRL_C = 130
"""Exit code that Typer makes of KeyboardInterrupt."""


def main() -> None:
    """Run the command line of this process and exit."""
    try:
        app(prog_name="nrl")
    except SystemExit as end:
        if end.code == CTRL_C:
            typer.echo("stopped by Ctrl-C", err=True)
        raise
    except NrlError as error:
        typer.echo(redacted("\n".join([f"error: {error}", *getattr(error, "__notes__", ())])), err=True)
        sys.exit(error.exit_code)
