"""The table of options agrees with signatures, docstrings, types and kernels."""

import inspect
import re

import pytest

from cupy_flash import api, append_to_kv_cache, attention, attention_with_kv_cache
from cupy_flash.engines import MODULES
from cupy_flash.gpu.params import dtypes
from cupy_flash.jit.source import CONFIG, kernel_folder
from cupy_flash.problem import argument_types, features
from cupy_flash.problem.features import SIZES
from cupy_flash.problem.records import (
    ARRAYS,
    CACHE_FEATURES,
    DIFFERENTIATED,
    FEATURES,
    FIELDS,
    MODS,
    NAMES,
    NUMBERS,
    CacheOperands,
    Gradients,
    Operands,
    Problem,
    SecondGradients,
    Tangents,
)

OPTIONS = {
    name: parameter
    for name, parameter in inspect.signature(attention).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}
# Options that only some rows serve over several ranks
OF_ONE_DEVICE = (*ARRAYS, *MODS, *(feature for feature in FEATURES if feature.kind == features.INTEGER))
BY_NAME = pytest.mark.parametrize("feature", FEATURES, ids=NAMES)


def documented(name):
    """Return the entry of an option in attention()'s docstring, joined to one line; None if there is none."""
    arguments = attention.__doc__.partition("Args:")[2].partition("Returns:")[0]
    names = rf"(?:\w+, )*{name}(?:, \w+)*"
    match = re.search(rf"(?:^ +|\. ){names}: (.*?)(?=^ {{8}}\w[\w, ]*: |\Z)", arguments, re.M | re.S)
    return re.sub(r"\s+", " ", match[1]) if match else None


def test_the_signature_has_the_options_of_the_table():
    assert tuple(OPTIONS) == NAMES
    assert [parameter.default for parameter in OPTIONS.values()] == [feature.default for feature in FEATURES]


def types_of(options):
    """Return {option: type} of a TypedDict of argument_types.py, for arrays of any library."""
    return {name: re.sub(r"\bT\b", "AnyArray", kind.__forward_arg__) for name, kind in options.__annotations__.items()}


def test_the_types_of_the_signature_are_those_of_keyword_arguments():
    assert types_of(argument_types.PaddedOptions) == {name: parameter.annotation for name, parameter in OPTIONS.items()}


def test_the_types_of_calls_on_a_cache_are_those_of_the_signature():
    signature = inspect.signature(attention_with_kv_cache).parameters.values()
    types = {x.name: x.annotation for x in signature if x.kind is inspect.Parameter.KEYWORD_ONLY}
    assert types_of(argument_types.CacheArguments) == types
    assert types_of(argument_types.CacheArgumentsWithoutLse).keys() == types.keys() - {"return_lse", "statistics"}


def test_every_kind_of_option_has_its_type():
    types = {
        features.ARRAY: "AnyArray | None",
        features.NUMBER: "float",
        features.FLAG: "bool",
        features.CHOICE: "str",
        features.CAUSAL: "Causal",
        features.WINDOW: "Window",
        features.SEED: "int | AnyArray | None",
        features.STATISTICS: "Names",
        features.INTEGER: "int",
    }
    mods = {"score_mod": "ScoreMod", "mask_mod": "MaskMod"}
    optional = {features.NUMBER, features.CHOICE, features.INTEGER}
    expected = {
        feature.name: mods.get(feature.name)
        or types[feature.kind] + " | None" * (feature.kind in optional and feature.default is None)
        for feature in FEATURES
    }
    assert types_of(argument_types.PaddedOptions) == expected | {"layout": "Layout"}


def served_over_ranks(feature):
    """Return whether an option is one of attention over several ranks; those of lists of keys are not."""
    return feature.ranks if feature in OF_ONE_DEVICE else not feature.host


@pytest.mark.parametrize(
    ("options", "serves"),
    [
        (argument_types.PaddedOptions, lambda feature: True),
        (argument_types.PackedOptions, lambda feature: not feature.padded and feature.name != "layout"),
        (argument_types.RanksOptions, served_over_ranks),
        (
            argument_types.PackedRanksOptions,
            lambda feature: served_over_ranks(feature) and feature.name != "layout",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_typed_dicts_have_the_options_of_the_table(options, serves):
    names = {feature.name for feature in FEATURES if serves(feature)}
    assert options.__annotations__.keys() == names
    without_lse = getattr(argument_types, f"{options.__name__}WithoutLse")
    assert without_lse.__annotations__.keys() == names - {feature.name for feature in FEATURES if feature.result}


def test_the_reference_takes_the_options_of_the_definition():
    names = {feature.name for feature in FEATURES if feature.definition}
    assert argument_types.ReferenceOptions.__annotations__.keys() == names | {"dtype", "order"}


def test_engines_name_the_common_options():
    """All do but cpu_decode, which is for few queries, and aten, which has those of torch's operators."""
    others = ("cpu_decode", "aten")
    named = [x.OPTIONS for name, x in MODULES.items() if x.OPTIONS is not None and name not in others]
    assert frozenset.intersection(*named) == {feature.name for feature in FEATURES if feature.common}


@BY_NAME
def test_every_option_is_documented(feature):
    text = documented(feature.name)
    assert text
    if feature in ARRAYS:
        dtype = "floating" if feature.dtypes == features.FLOATING else feature.dtypes[0]
        assert dtype in text
        for axes in feature.axes:
            assert f"({', '.join(SIZES[axis] for axis in axes)}{',' * (len(axes) == 1)})" in text
        if not feature.gradient and feature.dtypes == ("float32",) and not feature.fp8:
            assert "No gradient" in text


@BY_NAME
def test_every_option_reaches_its_field(feature, monkeypatch):
    """attention() passes its options to Options by position."""
    monkeypatch.setattr(api, "_forward", lambda function, arrays, options: options)
    value = object()
    options = attention(None, None, None, **{feature.name: value})
    given = {name: getattr(options, name) for name in NAMES}
    assert given == {other.name: other.default for other in FEATURES} | {feature.name: value}


@BY_NAME
def test_kernels_define_the_constants_and_members_of_a_feature(feature):
    config = (kernel_folder() / CONFIG).read_text()
    members = dtypes()["Params"].names
    if feature.constant:
        assert f"constexpr bool {feature.constant} = false;" in config
    if feature.element:
        assert f"using {feature.element} = " in config
    if feature in ARRAYS:
        assert (feature.name in members) != feature.host
        assert feature.name in Operands._fields and feature.field in Problem._fields
        assert (f"d{feature.name}" in members) == feature.gradient
    for member in filter(None, (feature.member, feature.leading_stride)):
        assert member in members


def test_each_kind_of_feature_has_its_columns():
    for feature in FEATURES:
        assert (feature.kind == features.ARRAY) == bool(feature.axes) == bool(feature.dtypes)
        assert (feature.kind == features.NUMBER) == bool(feature.range)
        assert (feature.kind == features.NUMBER and bool(feature.constant)) == bool(feature.example)
        assert not feature.element or feature.dtypes == features.FLOATING
        assert not feature.common or feature.definition
        assert set("".join(feature.axes)) <= SIZES.keys()


def test_the_records_have_the_fields_of_the_table():
    facts = [feature.field for feature in (*NUMBERS, *ARRAYS, *MODS)]
    facts += [f"{feature.field}_dtype" for feature in ARRAYS if feature.element]
    facts += [f"{feature.field}_gradient" for feature in ARRAYS if feature.optional_gradient]
    after_the_call = Problem._fields[Problem._fields.index("cache") + 1 :]
    assert sorted(after_the_call) == sorted(facts)
    assert Operands._fields[3:][: len(ARRAYS)] == tuple(feature.name for feature in ARRAYS)
    assert Gradients._fields == (*(f"d{name}" for name in DIFFERENTIATED), "dcaptured")
    assert SecondGradients._fields == (*Gradients._fields, "ddout", "ddlse")
    assert Tangents._fields == (*(f"t{name}" for name in DIFFERENTIATED), "tcaptured")
    assert set(Operands._fields) >= set(Tangents._fields)


@pytest.mark.parametrize("feature", CACHE_FEATURES, ids=lambda feature: feature.name)
def test_the_row_of_an_option_of_caches_names_members_and_options(feature):
    switches = "KV_CACHE", "PREFIXES", "SCALED_KV"
    members, names = dtypes("", switches)["Params"].names, [other.name for other in CACHE_FEATURES]
    if feature.constant:
        assert f"constexpr bool {feature.constant} = false;" in (kernel_folder() / CONFIG).read_text()
    if feature.kind == features.ARRAY and feature.name != "out":
        member = "cu_seqlens_q" if feature.name == "cu_seqlens_q" else FIELDS.get(feature.name, feature.name)
        assert (member in members) != feature.host and member in (*CacheOperands._fields, *Operands._fields)
    assert {conflict.other for conflict in feature.conflicts} <= set(names)
    if feature.rows:
        assert [len(axes) for axes in feature.axes] == [4]


def test_every_stride_of_params_belongs_to_an_array_with_that_many_axes():
    strides = [
        name for name in dtypes("", ("KV_CACHE", "PREFIXES"))["Params"].names if name.endswith(("_row", "_batch"))
    ]
    rows = {feature.leading_stride: feature for feature in (*ARRAYS, *CACHE_FEATURES) if feature.leading_stride}
    assert sorted(rows) == sorted(strides)
    assert all(max(map(len, feature.axes)) == 2 for feature in rows.values())


def test_the_options_of_an_append_are_those_of_the_table():
    signature = inspect.signature(append_to_kv_cache).parameters.values()
    names = {x.name for x in signature if x.kind is inspect.Parameter.KEYWORD_ONLY}
    assert names - {"cu_seqlens"} == {feature.name for feature in CACHE_FEATURES if feature.appends}
