"""The volumes of a pod as directories."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headgate.tests.support.kube.kubelet.spec import Lookup, NotReadyError, data, field, resource

Object = dict[str, Any]
TOKEN_SECONDS = 3600


@dataclass(frozen=True)
class Volumes:
    """Makes the volumes of one pod below `directory`."""

    directory: Path
    pod: Object
    lookup: Lookup
    claim: Callable[[str], Path]
    """The directory of a persistent volume claim; raises NotReadyError while it has none."""
    token: Callable[[Object], Awaitable[str]]
    """A token of the pod's service account, by the `serviceAccountToken` of a projected volume."""

    async def make(self) -> dict[str, tuple[Path, bool]]:
        """Each volume's directory by name, and whether it is read-only.

        Raises:
            NotReadyError: something that a volume refers to is missing.
        """
        return {
            volume["name"]: await self._volume(volume)
            for volume in self.pod["spec"].get("volumes", [])
        }

    async def _volume(self, volume: Object) -> tuple[Path, bool]:
        path = self.directory / volume["name"]
        if "hostPath" in volume:
            return self._host_path(volume["hostPath"]), False
        if "persistentVolumeClaim" in volume:
            claim = self.claim(volume["persistentVolumeClaim"]["claimName"])
            self._own(claim, group_only=True)
            return claim, volume["persistentVolumeClaim"].get("readOnly", False)
        if path.exists():
            return path, "emptyDir" not in volume
        if "emptyDir" in volume:
            path.mkdir(parents=True)
            path.chmod(0o777)
            self._own(path, group_only=False)
            return path, False
        self._write(path, volume, await self._files(volume))
        return path, True

    def _host_path(self, source: Object) -> Path:
        path = Path(source["path"])
        if source.get("type") == "DirectoryOrCreate":
            path.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            raise NotReadyError(f"hostPath {path} does not exist")
        return path

    def _own(self, path: Path, *, group_only: bool) -> None:
        group = self.pod["spec"].get("securityContext", {}).get("fsGroup")
        if group is not None:
            os.chown(path, -1, group)
            path.chmod(0o2775 if group_only else 0o2777)

    async def _files(self, volume: Object) -> Mapping[str, bytes]:
        if "configMap" in volume:
            return self._items(
                volume["configMap"], "configmaps", volume["configMap"].get("name", "")
            )
        if "secret" in volume:
            source = {**volume["secret"], "name": volume["secret"]["secretName"]}
            return self._items(source, "secrets", source["name"])
        if "downwardAPI" in volume:
            return self._downward(volume["downwardAPI"])
        if "projected" not in volume:
            raise NotReadyError(f"the process kubelet has no volumes such as {volume}")
        files: dict[str, bytes] = {}
        for source in volume["projected"].get("sources", []):
            if "serviceAccountToken" in source:
                token = await self.token(source["serviceAccountToken"])
                files[source["serviceAccountToken"]["path"]] = token.encode()
            elif "downwardAPI" in source:
                files |= self._downward(source["downwardAPI"])
            else:
                kind = "configmaps" if "configMap" in source else "secrets"
                one = source.get("configMap") or source["secret"]
                files |= self._items(one, kind, one["name"])
        return files

    def _items(self, source: Object, kind: str, name: str) -> dict[str, bytes]:
        found = data({**source, "name": name}, kind, self.lookup)
        if "items" not in source:
            return dict(found)
        missing = [item["key"] for item in source["items"] if item["key"] not in found]
        if missing and not source.get("optional"):
            raise NotReadyError(f"{kind} {name} has no key {', '.join(missing)}")
        return {
            item["path"]: found[item["key"]] for item in source["items"] if item["key"] in found
        }

    def _downward(self, source: Object) -> dict[str, bytes]:
        return {
            item["path"]: (
                field(self.pod, item["fieldRef"]["fieldPath"])
                if "fieldRef" in item
                else resource(self.pod, {}, item["resourceFieldRef"])
            ).encode()
            for item in source["items"]
        }

    def _write(self, path: Path, volume: Object, files: Mapping[str, bytes]) -> None:
        source = volume.get("configMap") or volume.get("secret") or volume.get("projected") or {}
        mode = source.get("defaultMode", 0o644)
        group = self.pod["spec"].get("securityContext", {}).get("fsGroup")
        path.mkdir(parents=True)
        for name, content in files.items():
            file = path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
            file.chmod(mode if group is None else mode | 0o440)
            if group is not None:
                os.chown(file, -1, group)
