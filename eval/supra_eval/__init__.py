"""Evaluation of a converted model beside its teacher and its own ablations.

Importing it makes lm-eval, where that is installed, know the model class `supra`.
"""

from importlib.util import find_spec

if find_spec("lm_eval") is not None:
    import lm_eval.models  # noqa: F401  (lm-eval takes a registry with one name in it for a filled one)
    from lm_eval.api.registry import model_registry

    if "supra" not in model_registry:
        model_registry.register("supra", target="supra_eval.harness.model:SupraLM")
