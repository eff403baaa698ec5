#include "core/engine/context.h"

#include "core/base/log.h"
#include "core/engine/group.h"
#include "core/engine/worker_pool.h"
#include "core/messages/doorbell.h"
#include "core/messages/point_to_point.h"
#include "core/shm/memory/abstract_socket.h"
#include "core/shm/memory/socket_directory.h"
#include "core/transport/networks.h"

namespace dscomm {
namespace {

// How long the end of the process waits for messages that are still in flight.
constexpr std::chrono::milliseconds kFlushLimit{1000};

}  // namespace

Context::~Context() {
  // Threads first: they use the rest.
  workers_.reset();
  point_to_point_.reset();
}

Result<std::shared_ptr<Context>> Context::create(const Settings& settings,
                                                 std::unique_ptr<Directory> directory,
                                                 TransportFactory make_transport,
                                                 const std::string& host) {
  std::shared_ptr<Context> context(new Context);
  context->settings_ = settings;
  context->flight_record_ = std::make_unique<FlightRecord>(settings.flight_record_dir);
  context->note_process();
  DSCOMM_ASSIGN_OR_RETURN(context->topology_, Topology::load(settings.topology));
  DSCOMM_ASSIGN_OR_RETURN(context->arena_, Arena::create(static_cast<size_t>(settings.arena_bytes),
                                                         context->topology_.get()));
  if (settings.pool_bytes > 0) {
    Result<std::shared_ptr<TensorPool>> pool =
        TensorPool::create(static_cast<size_t>(settings.pool_bytes), context->topology_.get());
    if (pool.ok())
      context->pool_ = std::move(pool).value();
    else
      log_line(LogLevel::kInfo, "no pool of tensors that peers read in place: {}",
               pool.status().message());
  }
  ArenaId doorbell_token;
  DSCOMM_ASSIGN_OR_RETURN(std::unique_ptr<Doorbell> doorbell, Doorbell::create(&doorbell_token));
  context->point_to_point_ =
      std::make_unique<PointToPoint>(context->arena_, settings, std::move(doorbell));
  context->workers_ =
      std::make_unique<WorkerPool>(std::chrono::milliseconds(settings.worker_idle_ms));
  context->host_identity_ = host.empty() ? host_identity() : host;
  // If DSCOMM_IFNAME matches no network, a group that spans hosts fails as its transport starts.
  if (auto networks = select_networks(own_interfaces(), settings.ifname); networks.ok())
    context->networks_ = std::move(networks).value();
  context->make_transport_ = std::move(make_transport);
  context->directory_ = std::move(directory);
  DSCOMM_ASSIGN_OR_RETURN(context->address_, context->directory_->publish(
                                                 context->arena_, context->pool_, doorbell_token));
  return context;
}

Result<std::shared_ptr<Context>> Context::process() {
  std::lock_guard lock(process_mutex_);
  if (process_context_ != nullptr) return *process_context_;
  DSCOMM_RETURN_IF_ERROR(handle_forks());
  DSCOMM_ASSIGN_OR_RETURN(Settings settings, Settings::from_environment());
  set_log_level(settings.debug);
  const bool on_signal = settings.flight_record_signal != "none";
  if (on_signal && settings.flight_record_dir.empty())
    return make_status(
        Code::kInvalidArgument,
        "DSCOMM_FLIGHT_RECORD_SIGNAL={}: expected DSCOMM_FLIGHT_RECORD_DIR to be set, too",
        settings.flight_record_signal);
  DSCOMM_ASSIGN_OR_RETURN(std::shared_ptr<Context> context,
                          create(settings, std::make_unique<SocketDirectory>()));
  if (on_signal)
    DSCOMM_RETURN_IF_ERROR(FlightRecord::write_on_signal(context->flight_record_.get()));
  process_context_ = new std::shared_ptr<Context>(context);
  return context;
}

std::shared_ptr<TensorPool> Context::process_pool() {
  std::lock_guard lock(process_mutex_);
  return process_context_ == nullptr ? nullptr : (*process_context_)->pool_;
}

FormingProcess Context::forming_process() const {
  std::lock_guard lock(transport_mutex_);
  return {arena_,          pool_,          directory_.get(), &address_,    &settings_,
          topology_.get(), host_identity_, networks_,        transport_id_};
}

void Context::add_group(uintptr_t world, bool is_default, std::weak_ptr<Group> group) {
  if (world == 0) return;
  std::lock_guard lock(worlds_mutex_);
  std::erase_if(worlds_, [](const auto& entry) { return entry.second.expired(); });
  if (is_default)
    worlds_.insert_or_assign(world, std::move(group));
  else
    worlds_.try_emplace(world, std::move(group));
}

std::shared_ptr<Group> Context::first_group(uintptr_t world) const {
  std::lock_guard lock(worlds_mutex_);
  auto found = worlds_.find(world);
  return found == worlds_.end() ? nullptr : found->second.lock();
}

void Context::note_formed(uintptr_t world, const std::string& name, uint64_t number) {
  if (std::shared_ptr<Group> first = first_group(world); first != nullptr) first->note_formed(name);
  if (number == 0) return;
  std::lock_guard lock(worlds_mutex_);
  std::atomic<uint64_t>& next = arena_->header().formed[formed_++ % kFormedGroups];
  next.store(number, std::memory_order_release);  // pairs with Group::formed_without_this()
}

Result<std::shared_ptr<Transport>> Context::transport(const TransportRequest& request,
                                                      std::shared_ptr<Store> store,
                                                      const Deadline& deadline) {
  // Held while the transport starts, until `deadline` at most. Another group that spans hosts waits
  // for the lock, and then fails if its request has another id.
  std::lock_guard lock(transport_mutex_);
  if (transport_id_ == request.id) return transport_;
  if (transport_id_ != 0)
    return Status(Code::kUnsupported,
                  "two groups that span hosts were made at the same time, and each would be the "
                  "first; make one after the other");
  DSCOMM_ASSIGN_OR_RETURN(std::shared_ptr<Transport> made,
                          make_transport_(request, std::move(store), deadline));
  transport_ = made;
  transport_id_ = request.id;
  return made;
}

void Context::end_transport() {
  std::shared_ptr<Context> context;
  std::shared_ptr<Transport> transport;
  {
    std::lock_guard lock(process_mutex_);
    if (process_context_ == nullptr) return;
    context = *process_context_;
    std::lock_guard transport_lock(context->transport_mutex_);
    transport = context->transport_;
  }
  if (transport == nullptr) return;
  context->point_to_point().flush(kFlushLimit);
  transport->leave(context->has_failed_.load(std::memory_order_relaxed));
}

}  // namespace dscomm
