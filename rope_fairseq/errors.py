"""Errors that the user can mend: one clear line, no traceback."""

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn


class UserError(ValueError):
    """Bad input: the message names the file or option, the bad value and what would be right."""


class Parser(argparse.ArgumentParser):
    """Options must be written out, and wrong ones are a :class:`UserError`: one line, where
    argparse prints its usage too."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists the options")


def describe(error: BaseException) -> str:
    """One line for a :class:`UserError` or an :class:`OSError`."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}{error.strerror}"
    return " ".join(str(error).split())


def run_main(main: Callable[[], None]) -> None:
    """Run a command-line ``main``; a :class:`UserError` or :class:`OSError` becomes one line
    ``error: …`` on standard error and exit status 2."""
    try:
        main()
    except BrokenPipeError:
        # The reader of our output (head, a pager) has gone: not an error worth a message.
        sys.stderr.close()
        sys.exit(141)
    except (UserError, OSError) as error:
        print(f"error: {describe(error)}", file=sys.stderr)
        sys.exit(2)
