"""Files from the Hugging Face Hub: fetched once, kept in its cache, checked against the hub's own SHA-256."""

import hashlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

WEIGHTS = "model.safetensors"


class Fetched(NamedTuple):
    """A file of a repository at one commit, in the local cache."""

    path: Path
    repository: str
    commit: str
    sha256: str

    def origin(self) -> dict[str, str]:
        """What a backbone's `origin` says about it."""
        return {"repository": self.repository, "commit": self.commit, "sha256": self.sha256}


def fetch(repository: str, filename: str = WEIGHTS, *, revision: str | None = None) -> Fetched:
    """Downloads a file with a progress bar, or takes it from the cache, also where there is no connection.

    A file whose SHA-256 is not the one that the hub states is refused.
    """
    try:
        endpoint = os.environ.get("HF_ENDPOINT")  # huggingface_hub itself looks at it once, when it is imported
        path = Path(hf_hub_download(repository, filename, revision=revision, endpoint=endpoint))
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        at = f" at {revision}" if revision else ""
        reason = "is gated; accept its terms on the hub and log in with `hf auth login`"
        reason = reason if isinstance(error, GatedRepoError) else f"is not on the hub{at}, or private; check its name"
        raise ValueError(f"{repository} {reason}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ValueError(_no_connection(repository, filename)) from error
    except EntryNotFoundError as error:
        raise ValueError(
            f"{repository} has no {filename}; only safetensors are fetched, as pickled weights could run code"
        ) from error
    except HFValidationError as error:
        raise ValueError(f"{repository!r} is not the name of a repository; write hf://user/name") from error
    except Exception as error:  # of whichever HTTP library huggingface_hub uses
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ValueError(f"{_no_connection(repository, filename)} ({reason})") from error
    sha256 = _sha256(path)
    stated = path.resolve().name  # the cache names large files by the SHA-256 that the hub states
    if re.fullmatch(r"[0-9a-f]{64}", stated) and stated != sha256:
        raise ValueError(
            f"{filename} of {repository} is damaged: its SHA-256 is {sha256[:12]}…, the hub states {stated[:12]}…; "
            f"remove {path.resolve()} and try again"
        )
    return Fetched(path, repository, path.parent.name, sha256)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def _no_connection(repository: str, filename: str) -> str:
    return (
        f"{filename} of {repository} is not on this machine, and the hub can't be reached; fetch it where there is a "
        f"connection with `hf download {repository} --local-dir DIR`, copy DIR here and give DIR instead"
    )
