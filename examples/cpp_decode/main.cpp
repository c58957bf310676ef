// Continues a text with the step of decoding that `mmfree export` wrote.
//
//   decode FOLDER COUNT TOKEN...
//
// reads the tokens and prints the COUNT tokens that are the most likely after them, one after the
// other.

#include <mlx/array.h>
#include <mlx/export.h>
#include <mlx/io.h>
#include <mlx/ops.h>
#include <mlx/transforms.h>

#include <charconv>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace mx = mlx::core;

namespace {

uint32_t whole_number(std::string_view text) {
  uint32_t number = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw std::invalid_argument("a whole number was expected but got '" + std::string(text) + "'");
  }
  return number;
}

// A text that a model reads token by token.
class Text {
 public:
  explicit Text(const std::filesystem::path& folder)
      : step_(mx::import_function((folder / "step.mlxfn").string())) {
    // without arguments, the function gives the state before the first token
    state_ = step_(mx::Args{});
    // weights that lie beside the function are handed to it by name
    if (auto file = folder / "weights.safetensors"; std::filesystem::exists(file)) {
      weights_ = mx::load_safetensors(file.string()).first;
    }
  }

  // Reads a token, and returns the one that is the most likely after it.
  uint32_t read(uint32_t token) {
    mx::Args inputs{mx::array({token}, mx::uint32)};
    inputs.insert(inputs.end(), state_.begin(), state_.end());
    std::vector<mx::array> outputs = step_(inputs, weights_);
    mx::array next = mx::argmax(outputs[0]);
    mx::array is_known = mx::logical_not(mx::any(mx::isnan(outputs[0])));
    state_.assign(outputs.begin() + 1, outputs.end());
    // all at once, so that no graph of past steps is kept
    std::vector<mx::array> results = state_;
    results.insert(results.end(), {next, is_known});
    mx::eval(results);
    if (!is_known.item<bool>()) {
      throw std::out_of_range("token " + std::to_string(token) +
                              " is not in the vocabulary, or the state has no room for it");
    }
    return next.item<uint32_t>();
  }

 private:
  mx::ImportedFunction step_;
  std::vector<mx::array> state_;
  mx::Kwargs weights_;
};

}  // namespace

int main(int argc, char* argv[]) {
  if (argc < 4) {
    std::cerr << "usage: decode FOLDER COUNT TOKEN...\n";
    return 2;
  }
  try {
    Text text(argv[1]);
    uint32_t count = whole_number(argv[2]);
    uint32_t next = 0;
    for (int place = 3; place < argc; place++) {
      next = text.read(whole_number(argv[place]));
    }
    for (uint32_t written = 0; written < count; written++) {
      std::cout << next << (written + 1 < count ? " " : "\n") << std::flush;
      if (written + 1 < count) next = text.read(next);
    }
  } catch (const std::exception& error) {
    std::cerr << "decode: " << error.what() << "\n";
    return 1;
  }
}
