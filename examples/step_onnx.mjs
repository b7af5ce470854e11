// Step an exported ONNX file in JavaScript: the state goes out of one step and into the next.
//
//     npm install onnxruntime-web
//     adptnet export runs/words step.onnx
//     node examples/step_onnx.mjs step.onnx inputs.json > outputs.json
//
// inputs.json holds the inputs of one sequence or of a batch: [step][sequence][feature], or [step][sequence] for tokens.
// outputs.json then holds [step][sequence][output]. The same lines run in a browser, with `fetch` for the file.
import { readFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// Packages are looked for from the current folder, so that this file can stay where it is.
const require = createRequire(pathToFileURL(`${process.cwd()}/`));
const ort = require("onnxruntime-web");

const KINDS = { float32: Float32Array, float64: Float64Array, int64: BigInt64Array };

function makeTensor(values, { type, shape }, batch) {
  const sizes = shape.map((size) => (typeof size === "number" ? size : batch)); // the batch has a name, not a size
  const flat = values ?? Array(sizes.reduce((a, b) => a * b, 1)).fill(0); // states and the position start at zero
  return new ort.Tensor(type, KINDS[type].from(flat, type === "int64" ? BigInt : Number), sizes);
}

const [file, data] = process.argv.slice(2);
const steps = JSON.parse(await readFile(data, "utf8"));
const session = await ort.InferenceSession.create(await readFile(file));
const [input, ...carried] = session.inputMetadata;
const batch = steps[0].length;
let state = Object.fromEntries(carried.map((each) => [each.name, makeTensor(null, each, batch)]));
const outputs = [];
for (const step of steps) {
  const results = await session.run({ [input.name]: makeTensor(step.flat(), input, batch), ...state });
  state = Object.fromEntries(carried.map(({ name }) => [name, results[`next_${name}`]]));
  const { data: flat, dims } = results.output;
  const size = dims.slice(1).reduce((a, b) => a * b, 1);
  outputs.push(Array.from({ length: batch }, (_, row) => Array.from(flat.slice(row * size, (row + 1) * size))));
}
process.stdout.write(JSON.stringify(outputs) + "\n");
