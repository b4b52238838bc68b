"""The ops: `<category>/<op>.py` holds descriptor, reference, cases and SKUs; `<op>.cu` beside it the CUDA kernels."""
