"""The layout: each part imports only parts before it."""

import ast
from functools import cache
from graphlib import TopologicalSorter

import pytest
from paths import ROOT, TESTS

FOLDERS = ("registry", "kernels", "dispatch", "tools")
ORDER = (
    "registry",
    "kernels",
    "kernels.elementwise",
    "kernels.quantize",
    "kernels.attention",
    "kernels.linear",
    "kernels.sampling",
    "dispatch.system",
    "dispatch.settings",
    "dispatch.preference",
    "dispatch.launch_cache",
    "dispatch.telemetry",
    "dispatch.host",
    "dispatch.cuda",
    "dispatch.compile",
    "dispatch.select",
    "dispatch.backends",
    "dispatch.plugins",
    "dispatch.plan",
    "dispatch.runtime",
    "dispatch.planner",
    "dispatch.advance",
    "dispatch.dispatcher",
    "dispatch.shard",
    "dispatch",
    "functional",
    "ops",
    "torch.ops",
    "torch.formats",
    "torch.linear",
    "torch.models",
    "torch.training",
    "torch.fuse",
    "torch.evaluation",
    "torch.convert",
    "torch.attention",
    "torch.exact",
    "torch.distributed",
    "torch.hf",
    "torch.certification",
    "torch.int4",
    "torch.transformers",
    "torch.peft",
    "torch.moved",
    "torch",
    "serving",
    "vllm.status",
    "vllm.warming",
    "vllm.fusion",
    "vllm.loading",
    "vllm.linear_kernel",
    "vllm.attention",
    "vllm.linear_method",
    "vllm.head",
    "vllm.config",
    "vllm.sampler",
    "vllm.sampler_v2",
    "vllm.adapters",
    "vllm.exact_model",
    "vllm.exact",
    "vllm.certified",
    "vllm",
)
"""Parts of `skuda`, each before those that may import it."""
TOOLS = (
    "tools.files",
    "tools.options",
    "tools.output",
    "tools.frame",
    "tools.parse",
    "tools.ship",
    "tools.verify",
    "tools.bench",
    "tools.studies",
    "tools.show",
    "tools.smoothquant",
    "tools.checkpoint",
    "tools.demo",
    "tools.testing",
    "tools.commands",
    "tools.cli",
    "tools",
)
"""The same for `skuda.tools`, which nothing else imports."""


LIFTED = (("dispatch", "torch"), ("dispatch", "serving"), ("dispatch", "vllm"))
"""Folders that are packages beside `skuda.dispatch`."""


def name_of(path):
    """The name under which a file is imported."""
    names = path.relative_to(ROOT).with_suffix("").parts
    names = names[2:] if names[1] == "skuda-package" else names[1:] if names[:2] in LIFTED else names
    return ".".join(("skuda", *names)).removesuffix(".__init__")


def part(module):
    """The part that a module belongs to: its folder; a module beside the folders of dispatch or tools is a part."""
    names = module.split(".")[1:]
    loose = names[:1] in (["registry"], ["serving"]) or (
        names[:1] == ["kernels"] and not (ROOT / "/".join(names[:2])).is_dir()
    )
    return ".".join(names[: 1 if loose else 2])


def imported(tree):
    """Names of the modules of skuda that a module imports when it runs, in functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("skuda."):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("skuda."))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = (each.value for each in node.args if isinstance(each, ast.Constant))
            yield from (name.partition(":")[0] for name in names if str(name).startswith("skuda."))
        yield from imported(node)


@cache
def imports():
    """The modules that each module imports, by name."""
    paths = {name_of(path): path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    found = {name: set(imported(ast.parse(path.read_text(encoding="utf-8")))) for name, path in paths.items()}
    # `from skuda.dispatch import Device` is an import of the folder's front.
    return {name: {o if o in paths else o.rpartition(".")[0] for o in others} for name, others in found.items()}


def known():
    return (*ORDER, *TOOLS)


@pytest.mark.parametrize("own", known())
def test_a_part_imports_only_parts_before_it(own):
    later = set(known()[known().index(own) + 1 :])
    mine = {name: others for name, others in imports().items() if part(name) == own}
    assert mine, "there is no such part any more"
    assert not {(name, other) for name, others in mine.items() for other in others if part(other) in later}


def test_every_part_has_its_place():
    unknown = set(map(part, imports())) - {"", "__main__", *known()}
    assert not unknown, "say in ORDER or TOOLS who may import it"


def test_no_module_imports_itself_by_way_of_others():
    list(TopologicalSorter(imports()).static_order())


def test_no_two_test_files_have_one_name():
    names = sorted(path.name for path in TESTS.rglob("test_*.py"))
    assert names == sorted(set(names))  # pytest would refuse to collect the second
