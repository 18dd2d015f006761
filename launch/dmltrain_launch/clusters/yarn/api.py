"""Requests to the REST API for services of a ResourceManager (Hadoop 3.3 or later), with simple authentication.

Source: Hadoop's YarnServiceAPI.md and its OpenAPI description. What fails is a LaunchError, with a fix if one is known.
"""

from __future__ import annotations

import getpass
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dmltrain_launch import LaunchError
from dmltrain_launch.clusters.queue import refusal

SECONDS = 60.0  # for an answer; YARN itself waits until a new service is accepted
PATH = "/app/v1/services"
UNAUTHORIZED, NOT_FOUND = 401, 404
# what YARN says: what to do
FIXES = {
    "unknown queue": "`mapred queue -list` prints the queues; --queue NAME chooses one",
    "cannot submit": "you may not use this queue: `mapred queue -showacls` prints those that you may",
    "already taken": "give another --job, or end that service with `yarn app -destroy NAME`",
    "already exists": "give another --job, or remove what is left of that service with `yarn app -destroy NAME`",
    "Invalid resource request": "no node is so large: ask for less with --worker-memory, --worker-cores and "
    "--worker-gpus; `yarn node -list -showDetails` prints what nodes have",
}


class Absent(LaunchError):
    """The ResourceManager does not answer."""


@dataclass(frozen=True)
class Api:
    """`url`: of the ResourceManager's web server, such as http://rm:8088. `user`: whom it takes this for."""

    url: str
    user: str

    def create(self, service: Mapping[str, Any]) -> None:
        self._call("POST", "", service)

    def get(self, name: str) -> dict[str, Any] | None:
        """The service as YARN describes it; None if it knows it no more."""
        return self._call("GET", f"/{name}")

    def destroy(self, name: str) -> None:
        """End the service, if it runs, and remove it; nothing if there is none."""
        self._call("DELETE", f"/{name}")

    def _call(self, method: str, path: str, content: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        url = f"{self.url}{PATH}{path}?{urllib.parse.urlencode({'user.name': self.user})}"
        data = None if content is None else json.dumps(content).encode()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        try:
            request = urllib.request.Request(url, data, headers, method=method)
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return _object(answer.read())
        except urllib.error.HTTPError as error:
            if error.code == NOT_FOUND and method != "POST":
                return None
            raise self._refused(f"{method} {PATH}{path}", error) from None
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", None) or error
            raise Absent(f"YARN's ResourceManager does not answer at {self.url}: {why}; is --yarn-url right?") from None

    def _refused(self, what: str, error: urllib.error.HTTPError) -> LaunchError:
        text = error.read().decode(errors="replace")
        said = str((_object(text.encode()) or {}).get("diagnostics") or text or error.reason).strip()
        if error.code == UNAUTHORIZED:
            said += "\nThis ResourceManager wants Kerberos, which dmltrain does not offer: use `dmltrain launch "
            said += "--dry-run`, and give what it prints to `yarn app -launch NAME FILE` after kinit"
        elif error.code == NOT_FOUND:
            said += "\nDoes it have yarn.webapp.api-service.enable=true in its yarn-site.xml?"
        return LaunchError(f"YARN answered {what} with {error.code}: {said}{refusal(said, FIXES)}")


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def me() -> str:
    return getpass.getuser()
