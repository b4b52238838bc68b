"""The names of cards: any spelling, architectures, and which older kernels serve a card."""

from __future__ import annotations

import pytest

from skuda.kernels.catalog import built_in_registry
from skuda.registry import InvalidProblem, InvalidRecord
from skuda.registry.device import KNOWN_DEVICES, device_named
from skuda.tools.parse.devices import cards_of, named_device, served_by

SPELLINGS = {
    "rtx4090": (
        "RTX 4090",
        "rtx-4090",
        "GeForce RTX 4090",
        "4090",
        "NVIDIA GeForce RTX 4090",
        "rtx_4090",
        "RTX4090 24GB",
    ),
    "l40s": ("L40S", "NVIDIA L40S", "nvidia-l40s", "l40s 48gb"),
    "a100": ("A100", "A100-80GB", "a100 80 GB", "NVIDIA A100-SXM4-80GB", "sm_80", "80", "8.0"),
    "h100": ("H100", "H100 SXM", "H100-SXM5-80GB", "sm_90", "SM90a", "NVIDIA H100 80GB HBM3"),
    "h200": ("h 200", "NVIDIA H200", "H200-141GB"),
    "rtx6000ada": ("RTX 6000 Ada", "rtx6000ada", "NVIDIA RTX 6000 Ada Generation"),
    "a6000": ("RTX A6000", "a6000"),
    "t4": ("T4", "NVIDIA T4", "Tesla T4", "sm_75"),
    "cpu": ("CPU",),
}


@pytest.mark.parametrize(("short", "spelling"), [(short, name) for short, names in SPELLINGS.items() for name in names])
def test_a_card_is_known_in_any_spelling(short, spelling):
    assert device_named(spelling) == KNOWN_DEVICES[short]
    assert named_device("explain", spelling) == (short, KNOWN_DEVICES[short])


@pytest.mark.parametrize("name", KNOWN_DEVICES)
def test_every_card_is_known_by_its_own_names(name):
    card = KNOWN_DEVICES[name]
    assert device_named(name) == device_named(name.upper()) == device_named(card.name) == card
    assert card.ordinal is None


@pytest.mark.parametrize(
    "name",
    [
        *("", "-", "a1", "rtx", "nvidia", "geforce", "80gb", "sxm", "0", "sm_70", "sm_9", "b100", "gb200", "voodoo"),
        *("A100-40GB", "A100 PCIe", "H100 PCIe", "H100 NVL", "RTX 4090 Laptop GPU", "h100 h200", "h200 h200"),
    ],
)
def test_another_card_is_never_taken_for_a_known_one(name):
    with pytest.raises(InvalidRecord, match="or an architecture such as sm_89"):
        device_named(name)
    with pytest.raises(InvalidProblem, match="--device must be one of here, cpu, a100"):
        named_device("explain", name, others=("here",))


def test_an_option_may_take_cards_only():
    with pytest.raises(InvalidProblem, match="--device must be one of a100"):
        named_device("compile", "cpu", cpu=False)


SHARED_KIB = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
"""Of the CUDA programming guide, table of technical specifications."""


@pytest.mark.parametrize("name", [name for name in KNOWN_DEVICES if name != "cpu"])
def test_the_facts_about_a_card_are_plausible(name):
    card = KNOWN_DEVICES[name]
    assert card.shared_memory == SHARED_KIB[card.compute_capability] << 10
    assert 40 <= card.sm_count <= 192
    assert 4 << 20 <= card.l2_cache <= 128 << 20
    assert 16 << 30 <= card.memory <= 288 << 30
    assert 300e9 <= card.memory_bandwidth <= 8e12
    # HBM reads all of a card's memory in some 20 to 40 ms, GDDR in up to 80 ms.
    assert 0.012 < card.memory / card.memory_bandwidth < 0.09


def test_cards_of_an_architecture():
    assert [card.name for card in cards_of("compile", "sm_89")] == [
        *("NVIDIA GeForce RTX 4090", "NVIDIA L4", "NVIDIA L40S", "NVIDIA RTX 6000 Ada Generation"),
    ]
    assert cards_of("compile", "sm_90a") == cards_of("compile", "sm_90")
    with pytest.raises(InvalidProblem, match="near: sm_89"):
        cards_of("compile", "sm_88")


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("cpu", ""),
        ("a100", ""),
        ("h200", ""),
        ("l4", "L4 has no kernels of its own and runs those of sm_80"),
        ("b200", "B200 has no kernels of its own and runs those of sm_80"),
        ("t4", "no kernel runs on T4: it has compute capability 7.5, and kernels need compute capability 8.0 or later"),
    ],
)
def test_which_older_kernels_serve_a_card(name, note):
    card = KNOWN_DEVICES[name]
    assert served_by(built_in_registry(), name.upper(), card.compute_capability) == note
