"""The bill of materials (SBOM) of a released package, as CycloneDX's JSON. Used by `release.py`, in `.venv-release`.

It names the package with its files, and all that it needs: what its own metadata asks for, and what that needs in
`uv.lock`, with versions and the hashes of the locked files. What only extras need is optional; the extra `test` is left
out. Licenses are what the metadata of the same version says in the environment that the package was tested in. The
same files, lock file, environment and time give the same text.
"""

from __future__ import annotations

import email.message
import hashlib
import importlib.metadata
import tomllib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import LicenseAcknowledgement
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

MACHINES = ("x86_64", "aarch64")  # whose wheels uv.lock names
LEFT_OUT = "test"


@dataclass
class Needed:
    """Packages of a lock file, by name, and which of them each needs."""

    packages: Mapping[str, dict[str, Any]]
    edges: dict[str, set[str]] = field(default_factory=dict)
    _seen: set[tuple[str, str]] = field(default_factory=set)

    def add(self, name: str, extras: Iterable[str] = ()) -> None:
        """A package, and what it needs, with some of its extras."""
        for extra in ("", *extras):
            if (name, extra) in self._seen:
                continue
            self._seen.add((name, extra))
            package = self.packages[name]
            edges = self.edges.setdefault(name, set())
            rows = package.get("optional-dependencies", {}).get(extra, ()) if extra else package.get("dependencies", ())
            for row in rows:
                if applies(row.get("marker")):
                    edges.add(row["name"])
                    self.add(row["name"], row.get("extra", ()))


def applies(marker: str | Marker | None, extra: str = "") -> bool:
    """Whether a marker is true on one of the machines that packages are locked for."""
    if marker is None:
        return True
    return any(Marker(str(marker)).evaluate({"platform_machine": machine, "extra": extra}) for machine in MACHINES)


def bill(
    metadata: email.message.Message,
    files: Sequence[Path],
    lock: Path,
    versions: Mapping[str, Version],
    site_packages: Path,
    time: int,
) -> str:
    """The text of a package's bill of materials.

    Args:
        metadata: Of the package's wheel.
        files: The wheel and the sdist.
        lock: `uv.lock`, which has all that the package asks for.
        versions: Of the packages of the workspace, by canonical name: uv.lock may be of a day before.
        site_packages: Of the environment that the package was tested in.
        time: Seconds since 1970, as of `SOURCE_DATE_EPOCH`.

    Raises:
        ValueError: CycloneDX's schema does not allow the result.
    """
    packages = {row["name"]: row for row in tomllib.loads(lock.read_text(encoding="utf-8"))["package"]}
    packages |= {name: {**packages.get(name, {}), "version": str(version)} for name, version in versions.items()}
    licenses = _licenses(site_packages)
    always, also, direct = Needed(packages), Needed(packages), set[str]()
    own = canonicalize_name(str(metadata["Name"]))
    for extra in ("", *metadata.get_all("Provides-Extra", [])):
        for requirement in map(Requirement, metadata.get_all("Requires-Dist", [])):
            needed = str(canonicalize_name(requirement.name))
            if extra != LEFT_OUT and needed != own and applies(requirement.marker, extra):
                direct.add(needed)
                also.add(needed, requirement.extras)
                if applies(requirement.marker):
                    always.add(needed, requirement.extras)
    root = _component(metadata["Name"], metadata["Version"], {_hashed(path) for path in files}, _license_of(metadata))
    root.description = metadata["Summary"]
    components = {
        name: _component(
            name,
            packages[name]["version"],
            {(wheel["filename"], wheel["hash"]) for wheel in packages[name].get("wheels", ())},
            licenses.get((name, Version(packages[name]["version"]).public)),
            ComponentScope.REQUIRED if name in always.edges else ComponentScope.OPTIONAL,
        )
        for name in also.edges
    }
    digest = hashlib.sha256("".join(sorted(name + value for name, value in map(_hashed, files))).encode())
    digest.update(lock.read_bytes())
    bom = Bom(
        components=components.values(),
        serial_number=uuid.uuid5(uuid.NAMESPACE_OID, digest.hexdigest()),
        metadata=BomMetaData(component=root, timestamp=datetime.fromtimestamp(time, UTC)),
    )
    bom.register_dependency(root, [components[name] for name in direct])
    for name, component in components.items():
        bom.register_dependency(component, [components[other] for other in also.edges[name]])
    text = f"{JsonV1Dot6(bom).output_as_string(indent=1)}\n"
    check(text)
    return text


def check(text: str) -> None:
    """A text is CycloneDX 1.6, to the letter of its schema.

    Raises:
        ValueError: It is not.
    """
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise ValueError(f"CycloneDX's schema does not allow the bill of materials: {error}")


def _component(
    name: str, version: str, files: Iterable[tuple[str, str]], license: str | None, scope: ComponentScope | None = None
) -> Component:
    purl = PackageURL("pypi", None, name, version)
    references = [
        ExternalReference(
            type=ExternalReferenceType.DISTRIBUTION,
            url=XsUri(file),
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest.removeprefix("sha256:"))],
        )
        for file, digest in files
    ]
    declared = LicenseAcknowledgement.DECLARED
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        bom_ref=str(purl),
        purl=purl,
        scope=scope,
        external_references=references,
        licenses=[LicenseFactory().make_from_string(license, license_acknowledgement=declared)] if license else [],
    )


def _hashed(path: Path) -> tuple[str, str]:
    return path.name, hashlib.sha256(path.read_bytes()).hexdigest()


def _licenses(site_packages: Path) -> dict[tuple[str, str], str]:
    """What installed distributions say of their license, by canonical name and version without a build's suffix."""
    found: dict[tuple[str, str], str] = {}
    for distribution in importlib.metadata.distributions(path=[str(site_packages)]):
        if said := _license_of(distribution.metadata):
            found[canonicalize_name(distribution.name), Version(distribution.version).public] = said
    return found


def _license_of(metadata: Any) -> str | None:
    """An expression, a short name, or what classifiers say; some write the license's whole text instead of its name."""
    for said in (metadata["License-Expression"], metadata["License"]):
        if said and said.strip() != "UNKNOWN" and "\n" not in said.strip() and len(said) < 100:
            return str(said).strip()
    names = [row.rpartition(" :: ")[2] for row in metadata.get_all("Classifier", []) if row.startswith("License :: ")]
    return " and ".join(sorted(names)) or None
