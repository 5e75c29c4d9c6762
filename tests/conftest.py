"""Settings of every test process and of the processes that tests start, made before torch is imported."""

import os

os.environ |= {
    "OMP_NUM_THREADS": "1",  # several processes share two cores
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # torch would import any accelerator plugin that is installed
    "HF_HUB_OFFLINE": "1",
}
