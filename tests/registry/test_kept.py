"""The hash and the arguments that a record keeps do not show in equality, copies, pickles or JSON."""

from __future__ import annotations

import copy
import pickle
from functools import partial

from toy import ToyDescriptor

from skuda.dispatch import PlanPreference, device_named
from skuda.registry import Argument, ElementKind, Role


def test_a_hash_is_kept_and_stays_out_of_copies_pickles_and_json():
    for make in (partial(ToyDescriptor, m=3), partial(PlanPreference, backend="numpy"), partial(device_named, "h200")):
        record, other = make(), make()
        before = (record.model_dump_json(), pickle.dumps(record), dict(vars(record)))
        assert hash(record) == hash(record) == hash(other)
        assert record == other
        assert {record: 1}[other] == 1
        assert (record.model_dump_json(), pickle.dumps(record), dict(vars(record))) == before
        for again in (copy.copy(record), copy.deepcopy(record), pickle.loads(pickle.dumps(record))):  # noqa: S301  our own
            assert again == record
            assert hash(again) == hash(record)


def test_a_copy_with_other_fields_has_a_hash_and_arguments_of_its_own():
    record = ToyDescriptor(m=3)
    hash(record), record.arguments()
    other = record.model_copy(update={"m": 4})
    assert other == ToyDescriptor(m=4)
    assert hash(other) == hash(ToyDescriptor(m=4)) != hash(record)
    assert other.arguments() == ToyDescriptor(m=4).arguments()


def test_arguments_are_made_once_for_a_problem():
    record = ToyDescriptor(m=3)
    assert record.arguments() is record.arguments()


def test_a_class_extends_the_arguments_of_its_base():
    class Longer(ToyDescriptor):
        def arguments(self):
            return (*super().arguments(), Argument("more", Role.INPUT, (ElementKind.F32,)))

    record = Longer(m=3)
    for _ in range(2):
        assert record.arguments() == (*ToyDescriptor(m=3).arguments(), Argument("more", Role.INPUT, (ElementKind.F32,)))
