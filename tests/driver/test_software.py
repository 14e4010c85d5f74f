"""The software device: the suite of all devices, and what is its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ironbatch.driver.faults import Faults
from ironbatch.driver.handle import DeviceHandle
from ironbatch.driver.reference import ReferenceDevice
from ironbatch.driver.software import SoftwareDevice, make_reference
from ironbatch.driver.spec import DeviceSpec
from ironbatch.errors import AbiMismatch, ConfigError, DeviceReset
from tests.driver.conformance import SMALL, Conformance, DeviceFactory
from tests.driver.records import submit


class Shared:
    """Several handles on one device in this process."""

    def __init__(self, device: ReferenceDevice) -> None:
        self._device = device
        self.handles: list[SoftwareDevice] = []

    def open(self, *, read_only: bool = False) -> DeviceHandle:
        self.handles.append(SoftwareDevice(self._device, read_only=read_only))
        return self.handles[-1]


@pytest.fixture
def device_factory() -> Iterator[DeviceFactory]:
    devices: list[Shared] = []

    def make(**spec: Any) -> Shared:
        devices.append(Shared(make_reference(DeviceSpec(**spec))))
        return devices[-1]

    yield make
    for device in devices:
        for handle in device.handles:
            handle.close()


class TestSoftwareDevice(Conformance):
    pass


def test_by_itself_it_has_a_device_of_its_own() -> None:
    with SoftwareDevice() as one, SoftwareDevice(DeviceSpec(blocks=5)) as other:
        assert (one.info.num_blocks, other.info.num_blocks) == (4096, 5)
        one.claim_blocks(4096)
        other.claim_blocks(5)


def test_faults_can_be_injected() -> None:
    with SoftwareDevice(DeviceSpec(**SMALL), injected=Faults(["reset@2"])) as device:
        submit(device).wait()
        with pytest.raises(DeviceReset):
            submit(device).wait()


@pytest.mark.parametrize("kind", ["hang", "vanish"])
def test_it_can_neither_hang_nor_vanish(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"--inject: {kind} would stop this very process; use a node"):
        SoftwareDevice(DeviceSpec(**SMALL), injected=Faults(["eio", f"{kind}@1"]))


def test_another_version_is_refused_with_both_named() -> None:
    with pytest.raises(AbiMismatch, match=r"speaks version 2\.5 of the device ABI, and this is version 1\.0"):
        SoftwareDevice(DeviceSpec(**SMALL, abi=(2, 5)))
    SoftwareDevice(DeviceSpec(**SMALL, abi=(1, 9))).close()
