from pathlib import Path

from fake_nxdi.decoder import read_checkpoint


def load_state_dict(folder):
    return {f"model.{name}": tensor for name, tensor in read_checkpoint(Path(folder)).items()}
