// All actors of a simulation, and random interleavings of them in one thread.
#pragma once

#include "protocol_actors.h"
#include "protocol_backward_roles.h"

namespace test {

struct Crew {
  std::vector<std::unique_ptr<Pipe>> pipes;
  std::vector<std::unique_ptr<Actor>> actors;

  explicit Crew(World& world) {
    const auto add = [&](auto actor) { actors.push_back(std::move(actor)); };
    for (int32_t r = 0; r < world.setup.shape.num_ranks; ++r) {
      add(std::make_unique<Front>(world, r));
      for (int32_t i = 0; i < world.setup.dispatchers(); ++i)
        for (Pass pass : {Pass::kForward, Pass::kBackward})
          add(std::make_unique<Dispatcher>(world, r, i, pass));
      for (int32_t i = 0; i < world.setup.compute_workers; ++i) {
        pipes.push_back(std::make_unique<Pipe>(world.setup.look_ahead));
        add(std::make_unique<Loader>(world, r, i, *pipes.back()));
        add(std::make_unique<Consumer>(world, r, i, *pipes.back()));
        add(std::make_unique<Scheduler>(world, r, i));
        add(std::make_unique<GradLoader>(world, r, i));
        add(std::make_unique<Storer>(world, r, i));
        for (int32_t warp = 0; warp < world.setup.consumer_warps; ++warp)
          add(std::make_unique<GradConsumer>(world, r, i, warp));
      }
    }
  }
};

struct Outcome {
  enum Kind { kDone, kDeadlock, kViolation } kind;
  std::string text;
};

// Lets random actors step until all are done or none can. Some actors are much slower than others.
inline Outcome simulate(World& world, Rng& rng) {
  world.seed = rng();
  Crew crew(world);
  std::vector<Actor*> tickets;
  for (const auto& actor : crew.actors)
    tickets.insert(tickets.end(), size_t{1} << (2 * pick(rng, 0, 2)), actor.get());
  const auto all_done = [&] {
    for (const auto& actor : crew.actors)
      if (!actor->done()) return false;
    return true;
  };
  size_t idle = 0;
  try {
    while (true) {
      Actor* actor = tickets[rng() % tickets.size()];
      if (!actor->done() && actor->step()) {
        idle = 0;
        continue;
      }
      if (++idle < 20) continue;
      if (all_done()) return {Outcome::kDone, ""};
      bool moved = false;  // steps have no effect when they return false: one sweep decides
      for (const auto& other : crew.actors)
        if (!other->done() && other->step()) moved = true;
      if (!moved) {
        std::string waiting;
        for (const auto& other : crew.actors)
          if (!other->done()) waiting += (waiting.empty() ? "" : ", ") + other->where();
        return {Outcome::kDeadlock, "no progress; waiting: " + waiting};
      }
      idle = 0;
    }
  } catch (const Violation& e) {
    return {Outcome::kViolation, e.what()};
  }
}

}  // namespace test
