"""
Translates rendered manifests into pods for `podman kube play`, without reading or starting anything.

podman knows pods, but no controller, Service, claim or plain Secret. So replicas become pods by name,
Services become names in a network, options become variables, Secrets become folders of files, and
claims become folders of this machine. Probes over gRPC, ports and hints for a scheduler of nodes are
left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Document = dict[str, Any]

_KEPT = ("securityContext", "terminationGracePeriodSeconds")
"""Keys of a pod's specification that podman acts on, or that do no harm."""
_KEPT_OF_CONTAINER = ("name", "image", "command", "args", "securityContext")


class TranslationError(Exception):
    """A manifest that cannot become pods; the message names what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPod:
    """
    One pod as podman gets it.

    Attributes:
        name: Name of the pod; its containers are called NAME-CONTAINER.
        workload: Name of the controller that it is a replica of.
        document: The manifest.
        aliases: Names in the network, those of the Services that select it.
        grace_s: Seconds from SIGTERM, or from preStop on, to SIGKILL.
        pre_stop_s: Seconds that preStop sleeps before SIGTERM, which podman does not do.
    """

    name: str
    workload: str
    document: Document
    aliases: tuple[str, ...]
    grace_s: int
    pre_stop_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """
    Pods, and files that they mount.

    Attributes:
        pods: All pods, executors first, by name.
        files: Content of each file of a Secret, by path below the folder of Secrets.
    """

    pods: tuple[LocalPod, ...]
    files: Mapping[str, bytes]


@dataclass(slots=True)
class _Translator:
    documents: list[Document]
    secrets: Mapping[str, Mapping[str, bytes]]
    claims: Mapping[str, str]
    folder: str
    files: dict[str, bytes] = field(default_factory=dict)

    def translate(self) -> Translation:
        found = [pod for document in self.documents for pod in self._replicas(document)]
        found.sort(key=lambda pod: (not pod.workload.endswith("executor"), pod.name))
        return Translation(pods=tuple(found), files=self.files)

    def _replicas(self, document: Document) -> Iterator[LocalPod]:
        if document["kind"] == "LeaderWorkerSet":
            raise TranslationError("a LeaderWorkerSet has no translation: render without it")
        if document["kind"] not in ("Deployment", "StatefulSet"):
            return
        name, spec = document["metadata"]["name"], document["spec"]
        for number in range(spec.get("replicas", 1)):
            yield self._pod(f"{name}-{number}", name, spec["template"])

    def _pod(self, name: str, workload: str, template: Document) -> LocalPod:
        spec, labels = template["spec"], template["metadata"]["labels"]
        made = {key: spec[key] for key in _KEPT if key in spec}
        made["restartPolicy"] = "Never"  # the harness restarts, and counts
        for kind in ("initContainers", "containers"):
            if kind in spec:
                made[kind] = [self._container(name, one) for one in spec[kind]]
        made["volumes"] = [self._volume(name, one) for one in spec.get("volumes", ())]
        pre_stop = [
            one["lifecycle"]["preStop"]["sleep"]["seconds"]
            for one in spec["containers"]
            if "lifecycle" in one
        ]
        return LocalPod(
            name=name,
            workload=workload,
            document={
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "labels": dict(labels)},
                "spec": made,
            },
            aliases=tuple(self._services(labels)),
            grace_s=spec["terminationGracePeriodSeconds"],
            pre_stop_s=max(pre_stop, default=0),
        )

    def _services(self, labels: Mapping[str, str]) -> Iterator[str]:
        for one in self.documents:
            if one["kind"] == "Service" and one["spec"]["selector"].items() <= labels.items():
                yield one["metadata"]["name"]

    def _container(self, pod: str, container: Document) -> Document:
        made = {key: container[key] for key in _KEPT_OF_CONTAINER if key in container}
        made["imagePullPolicy"] = "Never"
        made["env"] = [*self._options(container), *container.get("env", ())]
        made["volumeMounts"] = [
            one | {"name": f"{pod}-{one['name']}"} for one in container.get("volumeMounts", ())
        ]
        if memory := container["resources"].get("limits", {}).get("memory"):
            made["resources"] = {"limits": {"memory": memory}}
        if "exec" in container.get("livenessProbe", {}):
            made["livenessProbe"] = container["livenessProbe"]
        return made

    def _options(self, container: Document) -> Iterator[Document]:
        for source in container.get("envFrom", ()):
            name = source["configMapRef"]["name"]
            maps = [
                one["data"]
                for one in self.documents
                if one["kind"] == "ConfigMap" and one["metadata"]["name"] == name
            ]
            if not maps:
                raise TranslationError(f"ConfigMap {name} is named and not rendered")
            yield from ({"name": key, "value": value} for key, value in sorted(maps[0].items()))

    def _volume(self, pod: str, volume: Document) -> Document:
        """Translate a volume; pods of podman share what has one name, so that each has its own."""
        name = f"{pod}-{volume['name']}"
        if "emptyDir" in volume:
            return {"name": name, "emptyDir": {}}
        if claim := volume.get("persistentVolumeClaim"):
            if claim["claimName"] not in self.claims:
                raise TranslationError(f"no folder stands for the claim {claim['claimName']}")
            return _folder(name, self.claims[claim["claimName"]])
        if secret := volume.get("secret"):
            return _folder(name, f"{self.folder}/{self._write(secret)}")
        raise TranslationError(f"volume {name} is of no kind that is translated: {sorted(volume)}")

    def _write(self, secret: Document) -> str:
        """Add the files of a Secret, all or those of `items`; return their folder's path."""
        name = secret["secretName"]
        if name not in self.secrets:
            raise TranslationError(f"no content was given for the Secret {name}")
        content = self.secrets[name]
        paths = {one["key"]: one["path"] for one in secret.get("items", ())}
        folder = "-".join((name, *sorted(paths))) if paths else name
        for key in paths or content:
            if key not in content:
                raise TranslationError(f"the Secret {name} has no key {key}")
            self.files[f"{folder}/{paths.get(key, key)}"] = content[key]
        return folder


def translate(
    documents: list[Document],
    *,
    secrets: Mapping[str, Mapping[str, bytes]],
    claims: Mapping[str, str],
    folder: str,
) -> Translation:
    """
    Translate the documents of one rendering.

    Args:
        documents: All documents, as `kubectl kustomize` prints them.
        secrets: Content of each Secret by key, by name.
        claims: Folder of this machine for each volume claim, by name.
        folder: Folder in which the caller writes the files of Secrets.

    Raises:
        TranslationError: Something is named that is not there, or is of no kind that is translated.
    """
    return _Translator(documents, secrets, claims, folder).translate()


def _folder(name: str, path: str) -> Document:
    return {"name": name, "hostPath": {"path": path, "type": "Directory"}}
