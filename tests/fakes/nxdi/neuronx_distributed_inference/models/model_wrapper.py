from fake_nxdi.plan import CONTEXT as CONTEXT_ENCODING_MODEL_TAG
from fake_nxdi.plan import TOKEN as TOKEN_GENERATION_MODEL_TAG
from fake_nxdi.submodel import Submodel as ModelWrapper

__all__ = ["CONTEXT_ENCODING_MODEL_TAG", "TOKEN_GENERATION_MODEL_TAG", "ModelWrapper"]
