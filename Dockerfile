# FlashKernel in a container. The CPU stage runs anywhere:
#   docker build --target cpu -t flashkernel . && docker run --rm flashkernel check
# and the CUDA stage where the NVIDIA container toolkit is:
#   docker build --target cuda -t flashkernel:cuda . && docker run --rm --gpus all flashkernel:cuda check
FROM debian:12-slim AS cpu-build
COPY scripts/packages.sh /source/scripts/
RUN apt-get update -qq && /source/scripts/packages.sh demo && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN python3 -m venv /opt/flashkernel \
 && /opt/flashkernel/bin/pip install --no-cache-dir -C cmake.define.FK_CUDA=OFF '.[bench]' \
 && /opt/flashkernel/bin/fk info

FROM debian:12-slim AS cpu
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends python3 \
 && rm -rf /var/lib/apt/lists/*
COPY --from=cpu-build /opt/flashkernel /opt/flashkernel
ENV PATH=/opt/flashkernel/bin:$PATH
ENTRYPOINT ["fk"]
CMD ["info"]

FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS cuda-build
COPY scripts/packages.sh /source/scripts/
RUN apt-get update -qq && /source/scripts/packages.sh demo && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN python3 -m venv /opt/flashkernel \
 && /opt/flashkernel/bin/pip install --no-cache-dir -C cmake.define.FK_CUDA=ON '.[bench]' \
 && /opt/flashkernel/bin/fk info

# The CUDA runtime is inside the library: only the driver comes from outside.
FROM ubuntu:24.04 AS cuda
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends python3 \
 && rm -rf /var/lib/apt/lists/*
COPY --from=cuda-build /opt/flashkernel /opt/flashkernel
ENV PATH=/opt/flashkernel/bin:$PATH NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENTRYPOINT ["fk"]
CMD ["info"]
