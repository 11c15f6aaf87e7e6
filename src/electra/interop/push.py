"""Uploads a checked model folder to the Hugging Face Hub, with the Hub's client library.

Only files that the folder's manifests name are uploaded, in one commit: a visitor sees all of them or none. A folder that was not
checked, or that was changed since it was written (except for its card, which its owner may edit), is refused.
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from electra.base.errors import CorruptError, DataError, ElectraError, MachineError, SettingsError, first_line
from electra.base.files import FOLDER_FILES, FOLDER_MANIFEST, distrust, is_plain_name, read_object, refuse_edited
from electra.base.progress import live_bars
from electra.interop.card import CARD, TO_FILL

log = logging.getLogger(__name__)
REPOSITORY = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9_.-]{1,96}(/[A-Za-z0-9_.-]{1,96})?")
TOKEN_PAGE = "https://huggingface.co/settings/tokens"


@dataclass(frozen=True)
class Pushed:
    """An upload, or what it would be. `files` has sizes in bytes by path in the repository; `left_out` are other files of the folder;
    `url` is the commit's, "" if nothing was sent. `remarks` say what to look at before sending."""

    repository: str
    files: dict[str, int]
    left_out: list[str]
    remarks: list[str]
    url: str = ""


def push(folder: Path, repository: str, send: bool = False, public: bool = False) -> Pushed:
    """Says what would be uploaded and, with `send`, uploads it. A new repository is private unless `public`."""
    if not REPOSITORY.fullmatch(repository):
        raise SettingsError(
            f"{repository!r} is not a repository name. Use OWNER/NAME with letters, digits, - _ and dots."
        )
    files = checked_files(folder)
    try:
        import huggingface_hub
    except ImportError:
        raise MachineError(
            "push needs the package huggingface_hub. Install it from the clone: pip install '.[hf]'."
        ) from None
    there = {str(it.relative_to(folder)) for it in folder.rglob("*") if not it.is_dir()}
    remarks = [f"{CARD}: {key} is not filled in" for key in unfilled(folder / CARD)]
    if not huggingface_hub.get_token():
        remarks.append(f'no token: log in with "hf auth login", or set HF_TOKEN to one that may write ({TOKEN_PAGE})')
        if send:
            raise MachineError(f"push has {remarks[-1]}.")
    url = upload(folder, repository, files, public) if send else ""
    return Pushed(repository, files, sorted(there - files.keys()), remarks, url)


def checked_files(folder: Path) -> dict[str, int]:
    """The sizes of the files that the manifests of a folder and its subfolders name, and of those manifests."""
    has_manifest = (folder / FOLDER_MANIFEST).is_file()
    if not has_manifest and not (folder / "config.json").is_file():
        inside = sorted(str(it.parent) for it in folder.glob("*/config.json"))
        remedy = f"Push one of {', '.join(inside)}."
        remedy = remedy if inside else 'Give a folder that "electra export" or "electra finetune" wrote.'
        raise DataError(f"{folder} is not the folder of one model: it has no config.json. {remedy}")
    paths: list[Path] = []
    if not has_manifest:
        distrust(f"{folder} has no {FOLDER_MANIFEST}: nobody has checked it", 'Write it with "electra export"')
        paths = [it for it in sorted(folder.iterdir()) if is_plain_name(it.name)]
    for manifest in sorted(folder.rglob(FOLDER_MANIFEST)):
        refuse_edited(manifest.parent)
        names = [name for name in read_object(manifest) if is_plain_name(name)]
        paths += [*(manifest.with_name(name) for name in names), manifest]
        if link := next((it for it in paths if it.name in FOLDER_FILES and it.is_symlink()), None):
            raise CorruptError(f"{link} is a link. Put the file itself there.")
    return {str(it.relative_to(folder)): it.stat().st_size for it in paths if it.is_file() and not it.is_symlink()}


def unfilled(card: Path) -> list[str]:
    """The fields of the header that a run cannot know and nobody has filled in."""
    if not card.is_file():
        return list(TO_FILL)
    header = card.read_text("utf-8", "replace").split("\n---", 1)[0]
    return [key for key in TO_FILL if not re.search(rf"^{key}: *\S", header, re.MULTILINE)]


def upload(folder: Path, repository: str, files: Mapping[str, int], public: bool) -> str:
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import RepositoryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # hf_xet would send reports about uploads
    if not live_bars():
        disable_progress_bars()
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="electra")
    with answers(api.endpoint):
        owner = api.whoami()["name"]
        repository = repository if "/" in repository else f"{owner}/{repository}"
        try:
            is_private = api.repo_info(repository).private
        except RepositoryNotFoundError:
            api.create_repo(repository, private=not public)
        else:
            if not is_private and not public:
                raise SettingsError(
                    f"{repository} already exists and is public. Set public to confirm that.", ("public",)
                )
        log.info("%s: %d files, %s bytes to %s", folder, len(files), f"{sum(files.values()):,}", repository)
        operations = [CommitOperationAdd(name, str(folder / name)) for name in files]
        commit = api.create_commit(repository, operations, commit_message="Upload a model folder of electra")
        return str(commit.commit_url)


@contextmanager
def answers(endpoint: str) -> Iterator[None]:
    """Turns network errors into one line. The commit is the last request, so nothing is visible on the Hub before it."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    try:
        yield
    except ElectraError:
        raise
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        again = "Nothing was committed; run the same command again."
        answer = error if isinstance(error, HfHubHTTPError) else error.__cause__
        if not isinstance(answer, HfHubHTTPError):
            reason = first_line(error) or type(error).__name__
            if "xet-write-token" in reason:
                again = "Nothing was committed. If the server does not support Xet, set HF_HUB_DISABLE_XET=1."
            raise MachineError(f"{endpoint}: {reason.rstrip('.')}. {again}") from None
        code = answer.response.status_code
        reason = first_line(answer.server_message or answer.response.reason_phrase or "")
        status = f"{endpoint} answered {code}" + (f" ({reason.rstrip('.')})" if reason else "")
        if code in (401, 403):
            remedy = f"the token lacks permission. Log in with one that may write ({TOKEN_PAGE})"
            raise MachineError(f"{status}: {remedy}.") from None
        if code == 400:
            raise DataError(f"{status}: it does not accept these files. Nothing was committed.") from None
        raise MachineError(f"{status}. {again}") from None
