# The command line and the engine; docs/helm.md says how to build it and how to add your own code.
#   docker build -t headgate .
#   docker run --rm -v "$PWD:/home/headgate" headgate run job.yaml
ARG BASE=docker.io/library/python:3.12-slim

FROM ${BASE} AS build
# Extras of headgate that are installed, separated by commas.
ARG EXTRAS=s3,k8s
WORKDIR /src
RUN python3 -m venv /opt/headgate
# The dependencies are a layer of their own, which a change of the code leaves as it is.
COPY pyproject.toml setup.py README.md LICENSE ./
RUN python3 -c "import os, tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    extras = [name for name in os.environ['EXTRAS'].split(',') if name]; \
    more = [each for name in extras for each in project['optional-dependencies'][name]]; \
    print(*project['dependencies'], *more, sep='\n')" > /tmp/requirements.txt
RUN /opt/headgate/bin/pip install --no-cache-dir -r /tmp/requirements.txt
# What nothing in the image can use; docs/helm.md has the sizes. Ray's libraries need further extras of Ray, its
# jars Java, its pages the extra `default`; Arrow's headers need a compiler.
RUN cd /opt/headgate/lib/python3*/site-packages \
    && rm -rf ray/air ray/data ray/llm ray/rllib ray/serve ray/train ray/tune ray/jars ray/dashboard/client \
        pyarrow/include pyarrow/includes pyarrow/src \
    && find . -type d -name tests -prune -exec rm -rf {} +
# Tables of symbols, which only debuggers read. Libraries below *.libs were rewritten and must stay as they are.
RUN command -v strip || (apt-get update && apt-get install --yes --no-install-recommends binutils)
RUN find /opt/headgate -type f -not -path '*.libs/*' \
        \( -name '*.so' -o -name '*.so.*' -o -name raylet -o -name gcs_server \) \
        -exec strip --strip-unneeded {} +
COPY __init__.py errors.py py.typed ./
COPY state state
COPY api api
COPY operators operators
COPY connectors connectors
COPY runtime runtime
COPY spark spark
COPY testing testing
COPY k8s k8s
RUN /opt/headgate/bin/pip install --no-cache-dir --no-deps .

FROM ${BASE}
LABEL org.opencontainers.image.title="headgate" \
      org.opencontainers.image.description="A stateful stream processor for Python people, on Ray" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/headgate /opt/headgate
# A home that belongs to the user, who needs no entry in /etc/passwd: that of OpenShift has another number anyway.
RUN mkdir -p /home/headgate && chown 10001:0 /home/headgate && chmod 775 /home/headgate
ENV PATH=/opt/headgate/bin:$PATH \
    HOME=/home/headgate \
    PYTHONUNBUFFERED=1
# By number, so that Kubernetes can tell that it is not root.
USER 10001:10001
WORKDIR /home/headgate
ENTRYPOINT ["headgate"]
CMD ["--help"]
