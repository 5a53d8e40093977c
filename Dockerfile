# The library with all extras, on CPUs:
#     docker build -t fedcodist . && docker run --rm -v "$PWD/runs:/runs" fedcodist demo --workdir /runs/demo
# For a GPU, build with --build-arg JAX="jax[cuda12]" and run with --gpus all.
FROM python:3.13-slim
ARG JAX="jax"
COPY . /fedcodist
RUN pip install --no-cache-dir "$JAX" "/fedcodist[all]"
# Configs of `experiments` import each other.
ENV PYTHONPATH=/fedcodist
WORKDIR /runs
ENTRYPOINT ["fedcodist"]
