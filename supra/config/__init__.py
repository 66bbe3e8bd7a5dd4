"""The recipe: what one run converts, trains and reads, as frozen pydantic models (no torch here).

Notable:
- a recipe is a list of stages: what trains, against which loss, at which length, with which optimiser;
- a value left `null` in `conversion` takes the default of its feature map's method (`Conversion.resolve`);
- all errors of a recipe are reported at once: field, value, reason and nearest valid name (`recipe_io`).
"""

from supra.config.conversion import Conversion, Decay, FeatureMap, Norm, RopePosition
from supra.config.data import Data, Documents
from supra.config.optimizer import Lora, Optimizer
from supra.config.recipe import Recipe, TeacherWeights, conversion_from_options, flatten, load
from supra.config.stage import PositionScheme, Stage, WindowDropout

__all__ = [
    "Conversion",
    "Data",
    "Decay",
    "Documents",
    "FeatureMap",
    "Lora",
    "Norm",
    "Optimizer",
    "PositionScheme",
    "Recipe",
    "RopePosition",
    "Stage",
    "TeacherWeights",
    "WindowDropout",
    "conversion_from_options",
    "flatten",
    "load",
]
