"""A kubelet for rendered pods: their command, variables, user, capabilities, root filesystem and volumes as the manifest says, in namespaces of a host.

What an image would bring (system, Python, this package) are this machine's own folders, read-only. Not played: cgroups, seccomp, devices. Needs root.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.launch.hosts import Host
from tests.launch.kubernetes.controllers import expanded

ROOT = Path(__file__).parents[3]
SYSTEM = ("usr", "bin", "sbin", "lib", "lib64", "sys", "dev")
Manifest = dict[str, Any]


def of_kind(objects: Sequence[Manifest], kind: str) -> Manifest:
    """The one object of a kind."""
    (found,) = (o for o in objects if o["kind"] == kind)
    return found


@dataclass(frozen=True)
class Pod:
    """One pod of a rendered job on a host of its own."""

    host: Host
    hostname: str
    spec: Manifest
    """Its spec in the manifest."""
    objects: Sequence[Manifest]
    """What its volumes may name: ConfigMaps, Secrets."""
    claims: Mapping[str, Path]
    """Folders of the volumes that claims name."""
    names: Mapping[str, str]
    """What the cluster's DNS and the kubelet's /etc/hosts say: addresses by name."""
    folder: Path
    """Where the container's root and emptyDirs are made."""

    def start(self, log: Path, command: Sequence[str] = (), **variables: str) -> subprocess.Popen[bytes]:
        """Start the container; `command` in place of its own, with `variables` that a controller adds."""
        container = self.spec["containers"][0]
        words = list(command) or [_literal(word) for word in container["command"]]
        environ = image_variables() | {"HOSTNAME": self.hostname, "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
        environ |= expanded(container["env"]) | variables | {"PYTHONPATH": str(ROOT)}
        script = "\n".join(["set -e", *self._setup(container), f"exec {shlex.join([*self._leave(container), *words])}"])
        inside = ("ip", "netns", "exec", self.host.name, "unshare", "--mount", "--ipc", "--uts", "--pid", "--fork")
        kubelet = [*inside, "--kill-child", "--propagation", "private", "sh", "-c", script]
        with log.open("ab") as stream:
            return subprocess.Popen(kubelet, env=environ, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)

    @property
    def root(self) -> Path:
        """The container's root, as the host sees what lies below its mounts."""
        return self.folder / "root"

    def _setup(self, container: Manifest) -> list[str]:
        """Commands that make the container's filesystem, seen by it alone; the root is sealed last."""
        self._make_etc()
        commands = [f"hostname {self.hostname}", f"mount --bind {self.root} {self.root}"]
        links = [name for name in SYSTEM if Path("/", name).is_symlink()]
        for name in links:
            (self.root / name).symlink_to(os.readlink(f"/{name}"))
        commands += [self._bind(Path("/", name), f"/{name}", "rbind") for name in SYSTEM if name not in links]
        commands.append(f"mkdir -p {self.root}/proc && mount -t proc proc {self.root}/proc")
        volumes = {v["name"]: v for v in self.spec["volumes"]}
        for mount in container["volumeMounts"]:
            commands += self._volume(volumes[mount["name"]], mount)
        for code in (ROOT, Path(sys.prefix), Path(sys.base_prefix)):
            if not code.is_relative_to("/usr"):
                commands += [self._bind(code, str(code)), f"mount -o remount,bind,ro {self.root}{code}"]
        if container["securityContext"]["readOnlyRootFilesystem"]:
            commands.append(f"mount -o remount,bind,ro {self.root}")
        return commands

    def _make_etc(self) -> None:
        self.root.mkdir(parents=True)
        self.root.chmod(0o755)
        shutil.copytree("/etc", self.root / "etc", symlinks=True)
        lines = [f"{address}\t{name}" for name, address in self.names.items()]
        (self.root / "etc/hosts").write_text("\n".join(["127.0.0.1\tlocalhost", *lines, ""]))
        (self.root / "etc/resolv.conf").write_text(
            "nameserver 127.0.0.1\n"
        )  # says no at once to what is not in that file

    def _bind(self, source: Path, target: str, how: str = "bind") -> str:
        place = f"{self.root}{target}"
        return f"mkdir -p {shlex.quote(place)} && mount --{how} {shlex.quote(str(source))} {shlex.quote(place)}"

    def _volume(self, volume: Manifest, mount: Manifest) -> list[str]:
        target, group = mount["mountPath"], self.spec["securityContext"]["fsGroup"]
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            size = volume["emptyDir"]["sizeLimit"].removesuffix("i")
            return [f"mkdir -p {self.root}{target} && mount -t tmpfs -o size={size},mode=1777 shm {self.root}{target}"]
        commands = [self._bind(self._content(volume, group) / mount.get("subPath", ""), target)]
        if mount.get("readOnly"):
            commands.append(f"mount -o remount,bind,ro {self.root}{target}")
        return commands

    def _content(self, volume: Manifest, group: int) -> Path:
        """Folder of a volume, as the kubelet makes it: files of root and the pod's group, behind a link that updates swap."""
        if "persistentVolumeClaim" in volume:
            folder = self.claims[volume["persistentVolumeClaim"]["claimName"]]
            shutil.chown(folder, 0, group)
            folder.chmod(0o2775)
            return folder
        folder = self.folder / "volumes" / volume["name"]
        folder.mkdir(parents=True)
        shutil.chown(folder, 0, group)
        folder.chmod(0o2777)
        if "emptyDir" in volume:
            return folder
        texts, mode = self._texts(volume)
        (folder / "..2026").mkdir()
        (folder / "..data").symlink_to("..2026")
        for name, text in texts.items():
            (folder / "..2026" / name).write_text(text)
            shutil.chown(folder / "..2026" / name, 0, group)
            (folder / "..2026" / name).chmod(mode)
            (folder / name).symlink_to(f"..data/{name}")
        return folder

    def _texts(self, volume: Manifest) -> tuple[dict[str, str], int]:
        if "configMap" in volume:
            (found,) = (o for o in self.objects if _is(o, "ConfigMap", volume["configMap"]["name"]))
            return found["data"], volume["configMap"].get("defaultMode", 0o644)
        (found,) = (o for o in self.objects if _is(o, "Secret", volume["secret"]["secretName"]))
        return found["stringData"], volume["secret"].get("defaultMode", 0o644)

    def _leave(self, container: Manifest) -> list[str]:
        """Into the container's root as the pod's user, with what its security contexts leave."""
        pod, own = self.spec["securityContext"], container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False and own["capabilities"] == {"drop": ["ALL"]}
        user = [f"--reuid={pod['runAsUser']}", f"--regid={pod['runAsGroup']}", f"--groups={pod['fsGroup']}"]
        rights = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        return ["/usr/sbin/chroot", str(self.root), "setpriv", *user, *rights]


def image_variables() -> dict[str, str]:
    """What `containers/Dockerfile.cpu` sets, with this Python in the place of the image's."""
    text = (ROOT / "containers/Dockerfile.cpu").read_text(encoding="utf-8")
    (lines,) = re.findall(r"^ENV ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    found = dict(word.split("=", 1) for word in shlex.split(lines.replace("\\\n", " ")))
    return found | {"PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"}


def _is(manifest: Manifest, kind: str, name: str) -> bool:
    return bool(manifest["kind"] == kind and manifest["metadata"]["name"] == name)


def _literal(word: str) -> str:
    """A word of a command after Kubernetes' replacement; ours name no variable."""
    assert not re.search(r"(?<!\$)\$\(", word), word
    return word.replace("$$", "$")
