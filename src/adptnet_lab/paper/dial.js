"use strict";
(() => {
  const data = JSON.parse(document.getElementById("dial-data").textContent);
  const at = (id) => document.getElementById(id);
  const smallest = data.betas.find((beta) => beta > 0);
  const largest = data.betas[data.betas.length - 1];

  // β at a position of the slider: 0 at the left end, then logarithmic.
  const betaAt = (place) => (place === 0 ? 0 : smallest * (largest / smallest) ** place);
  const nearest = (beta, grid) =>
    grid.reduce((best, other, i) => (Math.abs(other - beta) < Math.abs(grid[best] - beta) ? i : best), 0);

  // Q = I + a S + b S S with S = beta (k v' - v k'); a and b depend on the angle.
  function rotation(beta) {
    const { key, value } = data;
    const size = key.length;
    const dot = key.reduce((sum, k, i) => sum + k * value[i], 0);
    const angle = beta * Math.sqrt(Math.max(0, 1 - dot * dot));
    const linear = angle < 1e-6 ? 1 : Math.sin(angle) / angle;
    const square = angle < 1e-6 ? 0.5 : (1 - Math.cos(angle)) / (angle * angle);
    const skew = (i, j) => beta * (key[i] * value[j] - value[i] * key[j]);
    const matrix = [];
    for (let i = 0; i < size; i++) {
      matrix.push([]);
      for (let j = 0; j < size; j++) {
        // k and v are unit vectors, so S S has this closed form.
        const skewSquared = beta * beta * (dot * (key[i] * value[j] + value[i] * key[j]) - key[i] * key[j] - value[i] * value[j]);
        matrix[i].push((i === j ? 1 : 0) + linear * skew(i, j) + square * skewSquared);
      }
    }
    return matrix;
  }

  function drawRotation(beta) {
    const matrix = rotation(beta);
    const canvas = at("dial-rotation");
    const pen = canvas.getContext("2d");
    const cell = canvas.width / matrix.length;
    let all = 0, diagonal = 0;
    pen.clearRect(0, 0, canvas.width, canvas.height);
    matrix.forEach((row, i) => row.forEach((entry, j) => {
      all += entry * entry;
      if (i === j) diagonal += entry * entry;
      pen.fillStyle = `rgba(0, 114, 178, ${Math.min(1, Math.sqrt(Math.abs(entry)))})`;
      pen.fillRect(j * cell, i * cell, Math.ceil(cell), Math.ceil(cell));
    }));
    at("dial-share").textContent = `|Q|: ${(100 * (1 - diagonal / all)).toFixed(2)} % of the squared entries are off the diagonal`;
  }

  const line = (x1, y1, x2, y2) => `<line class="axis" x1="${x1}" y1="${y1}" x2="${x2}" y2="${y2}"/>`;
  const text = (x, y, words, anchor = "start") => `<text x="${x}" y="${y}" text-anchor="${anchor}">${words}</text>`;

  function drawSpectrum(i) {
    const prescribed = data.log_eigenvalues, measured = data.exponents[i], [low, high] = data.certified[i];
    const all = [...prescribed, ...data.exponents.flat()].filter(Number.isFinite);
    const bottom = Math.min(...all) * 1.2, top = Math.max(0.1, ...all) + 0.15;
    const x = (k) => 40 + (240 * k) / (prescribed.length - 1);
    const y = (v) => 20 + (210 * (top - Math.min(Math.max(v, bottom), top))) / (top - bottom);
    const upper = high === null ? 20 : y(high), lower = low === null ? 230 : y(low);
    const certified = low === null && high === null ? "" :
      `<rect class="certified" x="40" y="${upper}" width="245" height="${Math.max(0, lower - upper)}"/>`;
    const path = prescribed.map((v, k) => `${k ? "L" : "M"}${x(k)},${y(v)}`).join("");
    const dots = measured.map((v, k) => v === null ? "" : `<circle class="measured" cx="${x(k)}" cy="${y(v)}" r="3.5"/>`).join("");
    at("dial-spectrum").innerHTML = certified + line(40, y(0), 285, y(0)) + text(36, y(0) + 4, "0", "end") +
      text(36, 230, bottom.toFixed(1), "end") + `<path class="prescribed" d="${path}"/>` + dots;
    const show = (v) => (v === null ? "∞" : v.toFixed(2));
    at("dial-interval").textContent = `Exponents (dots), ln λ̄ (line), certified [${low === null ? "−∞" : show(low)}, ${show(high)}] ` +
      `(shaded), at β = ${data.betas[i]}`;
  }

  function bars(id, names, values, top, unit) {
    const width = 240 / names.length;
    at(id).innerHTML = line(40, 220, 285, 220) + names.map((name, k) => {
      const value = values[k], height = value === null ? 0 : (190 * value) / top;
      const label = value === null ? "none" : value.toFixed(1) + unit;
      const left = 45 + k * width;
      return `<rect class="bar" x="${left}" y="${220 - height}" width="${width * 0.7}" height="${height}"/>` +
        text(left + width * 0.35, 213 - height, label, "middle") + text(left + width * 0.35, 238, name, "middle");
    }).join("");
  }

  function drawIterations(i) {
    const names = Object.keys(data.iterations);
    const top = Math.max(1, ...Object.values(data.iterations).flat().filter((v) => v !== null));
    bars("dial-iterations", names, names.map((name) => data.iterations[name][i]), top, "");
    at("dial-counts").textContent = `Mean iterations, width ${data.sizes.width}, ${data.sizes.length} steps, at β = ${data.betas[i]}`;
  }

  function drawAccuracy(beta) {
    if (!data.accuracy) {
      at("dial-scores").textContent = "Accuracy on the word problem: not run.";
      return;
    }
    const i = nearest(beta, data.accuracy.betas);
    bars("dial-accuracy", ["1×", "2×", "4× length"], data.accuracy.means[i], 100, " %");
    at("dial-scores").textContent = `Accuracy on ${data.accuracy.group}, at β = ${data.accuracy.betas[i]}`;
  }

  function update() {
    const beta = betaAt(Number(at("beta").value));
    const i = nearest(beta, data.betas);
    at("beta-value").textContent = beta.toPrecision(3);
    drawRotation(beta);
    drawSpectrum(i);
    drawIterations(i);
    drawAccuracy(beta);
  }

  at("beta").addEventListener("input", update);
  update();
})();
