# For GPU nodes: torch's wheels bring CUDA, the host brings the driver.
#   docker build -t patchmix . && docker run --gpus all --shm-size 8g -v "$PWD":/work patchmix demo
FROM python:3.11-slim
WORKDIR /build
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt . && useradd --create-home --uid 1000 patchmix
USER 1000
WORKDIR /work
ENTRYPOINT ["patchmix"]
CMD ["--help"]
