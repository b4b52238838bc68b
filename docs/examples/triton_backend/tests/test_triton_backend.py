from skuda.tools.testing import Conformance


class TestConformance(Conformance):
    package = "skuda-triton"
