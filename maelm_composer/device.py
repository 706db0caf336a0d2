"""The device that everything runs on: the GPU if there is one."""

import torch


def find_device() -> torch.device:
    return torch.device('cuda' if torch.cuda.is_available() else 'cpu')


def name_device() -> str:
    """As it stands in records: the GPU's name, or how many CPU threads this process uses."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f'CPU, {torch.get_num_threads()} threads'
