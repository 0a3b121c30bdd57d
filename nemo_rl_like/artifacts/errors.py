"""Errors that users meet: each states what is wrong, where, the limit and the fix."""

from __future__ import annotations


class NrlError(Exception):
    """Base of every error that the command line prints without a traceback."""

    exit_code = 1


class SpecError(NrlError):
    """The experiment spec is wrong; raised before anything starts."""

    exit_code = 2


class InputError(NrlError):
    """A file, model, tokenizer or dataset that the spec names cannot be used."""

    exit_code = 2


class OutputFolderError(NrlError):
    """The output folder cannot be used as asked (exists, is a file, is not writable)."""

    exit_code = 2


class StoppedBySignal(NrlError):
    """The run saved a checkpoint and stopped because it was asked to (SIGTERM, SIGUSR1, Ctrl-C)."""

    exit_code = 75


class SubmitError(NrlError):
    """A scheduler refused a job, or cannot be asked."""
