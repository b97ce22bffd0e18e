// Runs a program through the C++ Module API as the stock Android class does: tensors in by pointer, outputs planned.
//
//   runner PROGRAM CALLS DATA LIMIT [PART]
//
// CALLS is text: "call METHOD", then one line for each tensor in the method's order, "in|out int32|float32 OFFSET DIMS...".
// DATA holds their numbers, little endian. LIMIT bounds every float output's largest difference, relative to the largest
// expected number of that output; PART (0 when left out) the part of a method's int32 outputs that may differ.
// Exit: 0 within the bounds, 1 outside, 2 wrong use, 3 program not loaded, 4 method not loaded, 5 method not run.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>

using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::extension::Module;
using executorch::runtime::Error;
using executorch::runtime::EValue;

struct Numbers {
  ScalarType type;
  std::vector<SizesType> sizes;
  char* data;
  size_t count;
};

struct Call {
  std::string method;
  std::vector<Numbers> inputs, outputs;
};

struct Worst {
  double absolute = 0, relative = 0;
  size_t calls = 0, integers = 0, wrong_integers = 0;
};

[[noreturn]] static void stop(int code, const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(code);
}

static std::string named(Error error) {
  char code[16];
  std::snprintf(code, sizeof code, "0x%02x", static_cast<unsigned>(error));
  return std::string("error ") + code + " " + executorch::runtime::to_string(error);
}

// Mapped for reading only: a program that wrote its inputs would be stopped by the system.
static char* map_file(const char* path, size_t& size) {
  const int file = open(path, O_RDONLY);
  struct stat info;
  if (file < 0 || fstat(file, &info) != 0) stop(2, std::string(path) + " cannot be read");
  size = static_cast<size_t>(info.st_size);
  void* data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
  if (data == MAP_FAILED) stop(2, std::string(path) + " cannot be mapped");
  close(file);
  return static_cast<char*>(data);
}

static std::vector<Call> read_calls(const char* path, char* data, size_t size) {
  std::ifstream file(path);
  if (!file) stop(2, std::string(path) + " cannot be read");
  std::vector<Call> calls;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string kind, type;
    words >> kind >> type;
    if (kind == "call") {
      calls.push_back({type, {}, {}});
      continue;
    }
    Numbers numbers{type == "int32" ? ScalarType::Int : ScalarType::Float, {}, nullptr, 1};
    size_t offset = 0;
    words >> offset;
    for (SizesType dim; words >> dim;) {
      numbers.sizes.push_back(dim);
      numbers.count *= static_cast<size_t>(dim);
    }
    const bool known = (kind == "in" || kind == "out") && (type == "int32" || type == "float32");
    if (!known || calls.empty() || offset % 4 || offset + 4 * numbers.count > size) stop(2, "not understood: " + line);
    numbers.data = data + offset;
    (kind == "in" ? calls.back().inputs : calls.back().outputs).push_back(numbers);
  }
  return calls;
}

static std::vector<EValue> execute(Module& module, const Call& call) {
  if (const Error error = module.load_method(call.method); error != Error::Ok) {
    stop(4, "method " + call.method + " not loaded: " + named(error));
  }
  std::vector<executorch::extension::TensorPtr> tensors;
  std::vector<EValue> values;
  for (const Numbers& input : call.inputs) {
    tensors.push_back(executorch::extension::from_blob(input.data, input.sizes, input.type));
    values.emplace_back(tensors.back());
  }
  auto result = module.execute(call.method, values);
  if (!result.ok()) stop(5, "method " + call.method + " not run: " + named(result.error()));
  return std::move(result.get());
}

static void compare_float(const Numbers& expected, const float* found, Worst& worst) {
  const float* numbers = reinterpret_cast<const float*>(expected.data);
  double difference = 0, scale = 1e-9;
  for (size_t i = 0; i < expected.count; ++i) {
    const double each = std::abs(static_cast<double>(found[i]) - numbers[i]);
    // std::max would drop a NaN.
    difference = std::isnan(each) ? HUGE_VAL : std::max(difference, each);
    if (std::isfinite(numbers[i])) scale = std::max(scale, std::abs(static_cast<double>(numbers[i])));
  }
  worst.absolute = std::max(worst.absolute, difference);
  worst.relative = std::max(worst.relative, difference / scale);
}

static void compare(const Call& call, const std::vector<EValue>& values, Worst& worst) {
  if (values.size() != call.outputs.size()) stop(5, "method " + call.method + " has another number of outputs");
  for (size_t i = 0; i < values.size(); ++i) {
    const Numbers& expected = call.outputs[i];
    if (!values[i].isTensor()) stop(5, "method " + call.method + " has an output that is no tensor");
    const auto tensor = values[i].toTensor();
    const std::vector<SizesType> sizes(tensor.sizes().begin(), tensor.sizes().end());
    if (tensor.scalar_type() != expected.type || sizes != expected.sizes) {
      stop(5, "method " + call.method + " has another type or shape of output " + std::to_string(i));
    }
    if (expected.type == ScalarType::Float) {
      compare_float(expected, tensor.const_data_ptr<float>(), worst);
      continue;
    }
    const int32_t *found = tensor.const_data_ptr<int32_t>(), *numbers = reinterpret_cast<const int32_t*>(expected.data);
    worst.integers += expected.count;
    for (size_t j = 0; j < expected.count; ++j) worst.wrong_integers += found[j] != numbers[j];
  }
  ++worst.calls;
}

int main(int argc, char** argv) {
  if (argc < 5 || argc > 6) stop(2, "usage: runner PROGRAM CALLS DATA LIMIT [PART]");
  const double limit = std::atof(argv[4]), part = argc > 5 ? std::atof(argv[5]) : 0.0;
  size_t size = 0;
  char* data = map_file(argv[3], size);
  const std::vector<Call> calls = read_calls(argv[2], data, size);

  Module module(argv[1], Module::LoadMode::Mmap);
  if (const Error error = module.load(); error != Error::Ok) stop(3, "program not loaded: " + named(error));
  if (calls.empty()) stop(2, "no calls");
  std::map<std::string, Worst> worst;
  std::vector<EValue> last;
  for (size_t i = 0; i < calls.size(); ++i) {
    // Outputs lie in their method's memory until it runs again: another method runs before they are read, and may not touch them.
    const bool overwritten = i > 0 && calls[i].method == calls[i - 1].method;
    if (overwritten) compare(calls[i - 1], last, worst[calls[i - 1].method]);
    std::vector<EValue> values = execute(module, calls[i]);
    if (i > 0 && !overwritten) compare(calls[i - 1], last, worst[calls[i - 1].method]);
    last = std::move(values);
  }
  compare(calls.back(), last, worst[calls.back().method]);

  bool within = true;
  for (const auto& [method, each] : worst) {
    std::printf("%s: calls %zu, largest difference %.3g, relative %.3g, int32 that differ %zu of %zu\n", method.c_str(),
                each.calls, each.absolute, each.relative, each.wrong_integers, each.integers);
    within = within && each.relative <= limit && each.wrong_integers <= part * each.integers;
  }
  return within ? 0 : 1;
}
