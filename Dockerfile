# The worker, and the API as another command. Versions come from requirements.txt, which serves as the list of constraints; the embedded
# servers and the test tools stay out.
FROM python:3.13-slim

ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /app

# First the dependencies alone: a change of the code does not install them again.
COPY pyproject.toml requirements.txt LICENSE ./
RUN pip install --no-cache-dir --disable-pip-version-check --constraint requirements.txt ".[postgres,http]"

# A named volume takes over the owner of the folder that it covers, so the user may write its database there.
RUN useradd --system --uid 10001 --no-create-home saisei && install -d -o saisei /data
ENV SAISEI_HOME=/data

COPY . .
USER saisei
CMD ["python", "worker.py"]
