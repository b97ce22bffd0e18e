"""Errors a user may see: each message says what is wrong, what is allowed and what to do next."""

from __future__ import annotations


class EpiCacheError(Exception):
    """Base of all errors raised on purpose; ``exit_code`` is what a command line returns for it."""

    exit_code = 1


class UsageError(EpiCacheError):
    """The request itself is wrong: an impossible number, an unknown name, an empty question."""

    exit_code = 2


class WorkError(EpiCacheError):
    """A right request could not be carried out: missing or damaged input, no space, a check that failed."""


class BundleError(WorkError):
    """A bundle is missing, damaged, of another version, or not what its manifest says."""


class StoreError(WorkError):
    """A store is missing, damaged, locked by another writer, or belongs to another bundle."""


class Cancelled(EpiCacheError):
    """The caller asked to stop; everything finished so far is kept."""

    exit_code = 1
