# docker build -t adptnet . && docker run --rm adptnet adptnet --help
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/adptnet
COPY . .
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-cache-dir '.[lab,plots]' -c constraints.txt
ENV ADPTNET_CACHE=/opt/adptnet-cache
RUN adptnet kernels build && chmod -R go+rX "$ADPTNET_CACHE"
CMD ["adptnet", "--help"]
