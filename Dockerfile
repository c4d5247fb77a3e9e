# An image with dtmega. The build needs no network: it installs from wheels/, a folder with the wheels of dtmega and all
# its dependencies:
#
#     pip wheel -w wheels -c constraints.txt '.[data,hf]'
#     docker build -t dtmega .
#
# BASE needs Python >= 3.10 with venv, in the version that the wheels are for. docs/docker.md says how this was checked.
ARG BASE=python:3.12-slim
FROM ${BASE}

RUN --mount=type=bind,source=wheels,target=/wheels \
    python3 -m venv /opt/dtmega && \
    /opt/dtmega/bin/pip install --no-cache-dir --no-index --find-links /wheels 'dtmega[data,hf]'

# Starts torchrun on one node of a cluster: launch/kubeflow.yaml.
COPY launch/node.sh /opt/dtmega/bin/

# Any user, also one given by `docker run --user`, can write to the working directory, and has a home and a name.
RUN mkdir -m 1777 /workspace
ENV PATH=/opt/dtmega/bin:$PATH HOME=/workspace USER=dtmega
USER 1000:1000
WORKDIR /workspace
ENTRYPOINT ["dtmega"]
CMD ["--help"]
