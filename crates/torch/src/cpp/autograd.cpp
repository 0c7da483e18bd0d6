// Custom autograd nodes whose backward is a Rust closure, and the engine's entry points.
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "closure.h"
#include "tensor.h"

using at::Tensor;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

namespace isobar {

struct ClosureNode;

// Gradients in are owned by the callee, one null or handle an output; it fills one null or handle an input.
using Backward = void (*)(
    void* box, const ClosureNode* node, Tensor** grads, size_t grad_count, Tensor** results, size_t result_count,
    Failure* failure);

struct ClosureNode : public Node {
  ClosureNode(std::string name, std::unique_ptr<Closure> closure, Backward backward)
      : name_(std::move(name)), closure_(std::move(closure)), backward_(backward) {}

  std::string name() const override { return name_; }

  variable_list apply(variable_list&& grads) override {
    std::vector<Tensor*> in(grads.size());
    for (size_t i = 0; i < grads.size(); ++i) in[i] = release(std::move(grads[i]));
    std::vector<Tensor*> out(num_outputs(), nullptr);
    closure_->call([&](void* box, Failure* failure) {
      backward_(box, this, in.data(), in.size(), out.data(), out.size(), failure);
    });
    variable_list results;
    results.reserve(out.size());
    for (Tensor* handle : out) results.push_back(take(handle));
    return results;
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& saved : saved_) saved.reset_data();
  }

  Tensor unpack(size_t index) {
    std::lock_guard<std::mutex> lock(mutex_);
    return saved_.at(index).unpack(shared_from_this());
  }

  std::vector<SavedVariable> saved_;

 private:
  std::string name_;
  std::unique_ptr<Closure> closure_;
  Backward backward_;
};

static bool contains(const variable_list& list, const Tensor& tensor) {
  for (const auto& other : list)
    if (other.is_same(tensor)) return true;
  return false;
}

// Whether setting a history on `output` itself would harm: an input would turn from leaf to interior node, a view
// would hand its history to its base, and a tensor has one place in the graph only.
static bool needs_alias(const Tensor& output, const variable_list& inputs, const variable_list& earlier) {
  return output.defined() &&
      (output.requires_grad() || output.is_view() || contains(inputs, output) || contains(earlier, output));
}

static variable_list attach(
    std::string name, const variable_list& inputs, const variable_list& outputs, const variable_list& saved,
    std::unique_ptr<Closure> closure, Backward backward) {
  variable_list results;
  results.reserve(outputs.size());
  for (const auto& output : outputs)
    results.push_back(needs_alias(output, inputs, results) ? output.detach() : output);
  if (!torch::autograd::compute_requires_grad(inputs)) return results;

  std::shared_ptr<ClosureNode> node(
      new ClosureNode(std::move(name), std::move(closure), backward), torch::autograd::deleteNode);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  bool attached = false;
  for (const auto& result : results) {
    if (result.defined() && torch::autograd::isDifferentiableType(result.scalar_type())) {
      torch::autograd::set_history(result, node);
      attached = true;
    } else {
      // A place without metadata keeps the gradients' indices equal to the outputs'.
      node->add_input_metadata(Node::undefined_input());
    }
  }
  if (!attached) return results;
  for (const auto& tensor : saved) {
    size_t position = outputs.size();
    if (!contains(inputs, tensor))
      for (position = 0; position < outputs.size(); ++position)
        if (outputs[position].is_same(tensor)) break;
    bool is_output = position < outputs.size();
    node->saved_.emplace_back(is_output ? results[position] : tensor, is_output && results[position].requires_grad());
  }
  return results;
}

} // namespace isobar

using namespace isobar;

extern "C" {

// Takes `closure` in every case. `results`: one handle an output, owned by the caller.
void isobar_function_apply(
    const char* name, const Tensor* const* inputs, size_t input_count, const Tensor* const* outputs,
    size_t output_count, const Tensor* const* saved, size_t saved_count, void* closure, void (*drop)(void*),
    Backward backward, Tensor** results, Error* error) {
  auto owned = std::make_unique<Closure>(closure, drop);
  guarded(error, [&] {
    auto attached = attach(
        name, tensors(inputs, input_count), tensors(outputs, output_count), tensors(saved, saved_count),
        std::move(owned), backward);
    // Undefined outputs are handles too here, as tch knows them.
    for (size_t i = 0; i < attached.size(); ++i) results[i] = new Tensor(std::move(attached[i]));
  });
}

size_t isobar_node_saved_count(const ClosureNode* node) {
  return node->saved_.size();
}

Tensor* isobar_node_saved(ClosureNode* node, size_t index, Error* error) {
  return guarded(error, [&]() -> Tensor* { return new Tensor(node->unpack(index)); });
}

bool isobar_node_needs_input_grad(const ClosureNode* node, size_t index) {
  return index < node->num_outputs() && node->task_should_compute_output(index);
}

// Zeros shaped as output `index`.
Tensor* isobar_node_output_zeros(const ClosureNode* node, size_t index, Error* error) {
  return guarded(error, [&]() -> Tensor* {
    TORCH_CHECK(
        index < node->num_inputs() && !node->input_metadata(index).was_default_constructed(), "output ", index,
        " of a function with ", node->num_inputs(), " outputs has no gradient");
    return new Tensor(node->input_metadata(index).zeros_like());
  });
}

void isobar_backward(
    const Tensor* const* roots, size_t count, const Tensor* const* grads, const Tensor* const* inputs,
    size_t input_count, bool retain_graph, bool create_graph, Error* error) {
  guarded(error, [&] {
    torch::autograd::backward(
        tensors(roots, count), tensors(grads, count), retain_graph, create_graph, tensors(inputs, input_count));
  });
}

// `results`: one null or handle an input, owned by the caller.
void isobar_grad(
    const Tensor* const* outputs, size_t count, const Tensor* const* inputs, size_t input_count,
    const Tensor* const* grads, bool retain_graph, bool create_graph, bool allow_unused, Tensor** results,
    Error* error) {
  guarded(error, [&] {
    auto found = torch::autograd::grad(
        tensors(outputs, count), tensors(inputs, input_count), tensors(grads, count), retain_graph, create_graph,
        allow_unused);
    for (size_t i = 0; i < found.size(); ++i) results[i] = release(std::move(found[i]));
  });
}

} // extern "C"
