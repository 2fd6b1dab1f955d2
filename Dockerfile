# The command line and the engine, with S3:
#   docker build -t headgate .
#   docker run --rm -v "$PWD:/home/headgate/work" -w /home/headgate/work headgate run job.yaml
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE __init__.py errors.py py.typed ./
COPY state state
COPY operators operators
COPY connectors connectors
COPY runtime runtime
COPY spark spark
COPY testing testing
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/headgate-*.whl)[s3]" \
    && useradd --create-home --uid 1000 headgate
ENV PYTHONUNBUFFERED=1
# By number, so that Kubernetes can tell that it is not root.
USER 1000
WORKDIR /home/headgate
ENTRYPOINT ["headgate"]
CMD ["--help"]
