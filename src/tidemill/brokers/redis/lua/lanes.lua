-- Lanes: each key of each limit by name.
--
-- All ready jobs of a lane lie in a table of their own, for each line it has jobs in. Of each line the
-- first also stands in the ready line, if the gate lets it start: so a lease finds what may start where it
-- finds all else, and never walks over what may not. Whatever changes in a lane makes it *stale*; `sync`
-- then makes what stands in the ready lines true again. There the first job of a lane with a key has the
-- number of the lane's last lease for its sequence, when that is higher: keys take turns.
--
--   B:lane     hash    LANE (name, a zero, key) → see pack_lane; B:lanes zset, all 0, has them in order
--   B:lane:LINE\0LANE  zset seq8·id by rank     its ready jobs
--   B:parked:LINE      set  LANE that has ready jobs there
--   B:clear    zset    LANE that nothing is in by when it tells no more than none would
-- B:due has a·LANE for those that time alone opens.

do

local CLEARS, STANDS = 1, 2
local FLAGS = 13 -- where they are

-- Fixed part (how many run, its last lease, flags: whether it is to be cleared when due; whether a job stands in
-- each of its lines), then the gate behind its size, then for each line: its name, 1 when one stands there, its
-- rank and number, and its id.
local function pack_lane(lane)
  local gate, flags, lines = Gate.pack(lane.gate), lane.clears and CLEARS or 0, ''
  local line, head = next(lane.lines)
  if line then flags = flags + STANDS end
  while line do
    if head then
      lines = lines .. pack('>I2c0BI4I8I2c0', #line, line, 1, head.rank, head.number, #head.id, head.id)
    else
      lines = lines .. pack('>I2c0B', #line, line, 0)
      flags = bit.band(flags, CLEARS)
    end
    line, head = next(lane.lines, line)
  end
  return pack('>I4I8BdI4c0', lane.running, lane.turn, flags, lane.due, #gate, gate) .. lines
end

local function parse_lane(data)
  local running, turn, flags, due, gate, at = unpk('>I4I8BdI4c0', data)
  local lane = {running = running, turn = turn, clears = flagged(flags, CLEARS), due = due, gate = Gate.parse(gate), lines = {}}
  while at <= #data do
    local line, stands
    line, stands, at = unpk('>I2c0B', data, at)
    lane.lines[line] = false
    if stands == 1 then
      local head = {}
      head.rank, head.number, head.id, at = unpk('>I4I8I2c0', data, at)
      lane.lines[line] = head
    end
  end
  return lane
end

-- The lane and the cost that a record has, whose state and times are not looked at.
function Lanes.lane_of(data)
  local queue = byte(data, 31)
  local key = byte(data, 32 + queue)
  local name, cost = unpk('>I2c0d', data, 33 + queue + key)
  return name, cost
end

function Lanes.cost_of(id)
  local data = jobs[id]
  if type(data) ~= 'string' then return load_job(id).cost end
  return (select(2, Lanes.lane_of(data)))
end

-- Read the lanes of some jobs, just read, at once.
function Lanes.read_ahead(ids)
  local names, known = {}, limits.lanes
  for _, id in ipairs(ids) do
    local data = jobs[id]
    if type(data) == 'string' and byte(data, 10) >= LIMITED then
      local name = Lanes.lane_of(data)
      if known[name] == nil then
        known[name] = false
        names[#names + 1] = name
      end
    end
  end
  for i, data in ipairs(fetch_all(B .. ':lane', names)) do known[names[i]] = data or nil end
end

function Lanes.of(name)
  local lane = limits.lanes[name]
  if type(lane) ~= 'table' then
    local data = lane or call('HGET', B .. ':lane', name)
    lane = data and parse_lane(data) or {is_new = true, running = 0, turn = 0, clears = false, due = 0, gate = Gate.new(), lines = {}}
    limits.lanes[name] = lane
  end
  return lane
end

function Lanes.split(name)
  local cut = string.find(name, '\0', 1, true)
  return sub(name, 1, cut - 1), sub(name, cut + 1)
end

function Lanes.park_of(line, name) return B .. ':lane:' .. line .. '\0' .. name end

-- It is to be looked at once more.
local function make_stale(name)
  limits.changed[name], limits.stale[name] = true, true
end
Lanes.make_stale = make_stale

-- A job of a lane is ready.
function Lanes.enter(j)
  local line, lane = line_of(j), Lanes.of(j.lane)
  call('ZADD', Lanes.park_of(line, j.lane), j.rank, pack('>I8', j.seq) .. j.id)
  if lane.lines[line] == nil then
    lane.lines[line] = false
    call('SADD', B .. ':parked:' .. line, j.lane)
    local row = row_of(j.queue)
    if not row.laned then call('HSET', row.key, 'laned', 1) end
    row.laned = true
  end
  count(j.queue, 'parked', 1)
  local came = limits.came[j.lane]
  if not came then
    came = {}
    limits.came[j.lane] = came
  end
  came[line] = (came[line] or 0) + 1
  limits.changed[j.lane] = true
  local head = lane.lines[line] -- which no other can go before that came later
  if not head or j.rank < head.rank or j.rank == head.rank and j.seq < head.number then make_stale(j.lane) end
end

-- A ready job of a lane is taken away.
function Lanes.leave(j)
  call('ZREM', Lanes.park_of(line_of(j), j.lane), pack('>I8', j.seq) .. j.id)
  count(j.queue, 'parked', -1)
  make_stale(j.lane)
end

-- A job that stood in the ready line has been taken from it.
function Lanes.taken(j)
  Lanes.of(j.lane).lines[line_of(j)] = false
  count(j.queue, 'parked', 1)
  Lanes.leave(j)
end

-- Whether another owner sleeps for what a line has.
local function is_slept_for(line, owner)
  for _, key in ipairs({B .. ':z:' .. line, B .. ':z:' .. sub(line, 1, 1)}) do
    for _, sleeper in ipairs(call('ZRANGE', key, 0, 9)) do
      if sleeper ~= owner and call('ZSCORE', K_ASLEEP, sleeper) then return true end
    end
  end
  return false
end

-- Whether others are to have the place of a job that an owner could take: older ones of its lane wait in queues
-- that it does not take from (`mine`, by name), and somebody sleeps for them, who is hinted.
function Lanes.leave_place(j, mine, owner)
  local lane, heirs = Lanes.of(j.lane), {}
  for line, head in pairs(lane.lines) do
    local queue = sub(line, 2)
    if head and not mine[queue] and sub(line, 1, 1) ~= 'L' then
      local older = head.rank < j.rank or head.rank == j.rank and load_job(head.id).seq < j.seq
      local row = older and row_of(queue)
      if row and not row.paused and (not row.gate or Gates.room(row, 1) > 0) and is_slept_for(line, owner) then
        heirs[#heirs + 1] = line
      end
    end
  end
  local room = #heirs > 0 and Gate.room(Terms.of_lane(j.lane), lane.gate, lane.running, #heirs + 1)
  if not room or room > #heirs then return false end
  for _, line in ipairs(heirs) do rings[line] = math.max(1, rings[line] or 0) end
  return true
end

-- Have those stand in a line again, (rank, member) each, that were looked at and not taken.
function Lanes.put_back(line, left)
  for _, entry in ipairs(left) do add_to_line(line, unpack(entry)) end
  flush_lines()
end

-- A job that was taken is leased.
function Lanes.start(j, token)
  local lane = Lanes.of(j.lane)
  Gate.take(Terms.of_lane(j.lane), lane.gate, j.cost)
  lane.running = lane.running + 1
  lane.turn = token
end

-- A lease of the lane has ended. Where a job stands in each of its lines, no other can be the first.
function Lanes.ended(name)
  local lane = limits.lanes[name]
  limits.changed[name] = true
  if type(lane) == 'string' and flagged(byte(lane, FLAGS), STANDS) then -- the hot path
    limits.lanes[name] = pack('>I4', unpk('>I4', lane) - 1) .. sub(lane, 5)
    return
  end
  lane = Lanes.of(name)
  lane.running = lane.running - 1
  local line, head = next(lane.lines)
  while head do line, head = next(lane.lines, line) end
  if line or not next(lane.lines) and lane.running == 0 then make_stale(name) end
end

-- A lease goes back, and its job never ran.
function Lanes.give_back(j)
  Gate.give_back(Terms.of_lane(j.lane), Lanes.of(j.lane).gate, j.leased, j.cost)
  make_stale(j.lane)
end

-- A lease made at that time goes to the carrier.
function Lanes.hold(j, taken)
  Gate.hold(Terms.of_lane(j.lane), Lanes.of(j.lane).gate, taken, j.cost)
  make_stale(j.lane)
end

-- A job lies with the carrier no more.
function Lanes.let_go(j, starts)
  local lane = Lanes.of(j.lane)
  Gate.let_go(lane.gate, j.cost)
  if starts then
    Gate.take(Terms.of_lane(j.lane), lane.gate, j.cost)
  else
    lane.running = lane.running - 1
  end
  make_stale(j.lane)
end

function Lanes.came_due(name)
  local lane = Lanes.of(name)
  lane.due, lane.clears = 0, false
  make_stale(name)
end

-- Have another job stand in a ready line for its lane, or none.
local function stand(line, old, new)
  local queue = sub(line, 2)
  if old then
    flush_lines()
    call('ZREM', B .. ':r:' .. line, pack('>I8', old.number) .. old.id)
    count(queue, 'parked', 1)
  end
  if new then
    add_to_line(line, new.rank, pack('>I8', new.number) .. new.id)
    count(queue, 'parked', -1)
  end
end

-- One time to look at it again: when it opens, or when nobody need know of it.
function Lanes.arm(name, lane, terms, opening)
  local due, clears = opening < Gate.NEVER and opening or 0, false
  if not next(lane.lines) and lane.running == 0 then
    local clear = Gate.clear_at(terms, lane.gate)
    due, clears = clear > now and clear or 0, true
  end
  if due == lane.due and (due == 0 or clears == lane.clears) then return end
  if lane.due > 0 then
    if lane.clears then call('ZREM', B .. ':clear', name) else call('ZREM', K_DUE, 'a' .. name) end
  end
  if due > 0 and clears then
    call('ZADD', B .. ':clear', due, name)
  elseif due > 0 then
    add_due(due, 'a' .. name)
  end
  lane.due, lane.clears = due, clears
end

-- Hint those who sleep: so many jobs of a line may start, or as many as the gate lets.
local function ring_lane(lane, terms, line, more)
  rings[line] = (rings[line] or 0) + math.max(1, Gate.room(terms, lane.gate, lane.running, more))
end

local function sync_lane(name, rung)
  local lane, came = Lanes.of(name), limits.came[name] or {}
  limits.stale[name], limits.came[name] = nil, nil
  local key = select(2, Lanes.split(name))
  local terms, opening = Terms.of_lane(name), Gate.NEVER
  local lines = {}
  for line in pairs(lane.lines) do lines[#lines + 1] = line end
  for _, line in ipairs(lines) do
    local head, want = lane.lines[line], false
    local first = call('ZRANGE', Lanes.park_of(line, name), 0, 0, 'WITHSCORES')
    if first[1] then
      local id = sub(first[1], 9)
      local paced = terms.rate or terms.window
      local when = Gate.opens(terms, lane.gate, lane.running, paced and Lanes.cost_of(id) or 1)
      if when > 0 then
        opening = math.min(opening, when)
      else
        local number = unpk('>I8', first[1])
        want = {rank = tonumber(first[2]), number = key ~= '' and math.max(number, lane.turn) or number, id = id}
      end
      lane.lines[line] = want
    else
      lane.lines[line] = nil
      call('SREM', B .. ':parked:' .. line, name)
    end
    local same = head and want and head.rank == want.rank and head.number == want.number and head.id == want.id
    if (head or want) and not same then stand(line, head, want) end
    if want and rung and (came[line] or not head) then ring_lane(lane, terms, line, came[line] or 1) end
  end
  Lanes.arm(name, lane, terms, opening)
end

-- The next of a lane takes the place of one that was just leased: nobody need be woken for it.
function Lanes.follow(name) sync_lane(name, false) end

-- Make what stands in the ready lines true for every lane that has changed; and with `sync` have sleepers
-- and the clock know of queues that opened or closed.
function Limits.sync_lanes()
  local name = next(limits.stale)
  while name do
    sync_lane(name, true)
    name = next(limits.stale)
  end
  for lane, came in pairs(limits.came) do -- behind those that stand there
    for line, more in pairs(came) do ring_lane(Lanes.of(lane), Terms.of_lane(lane), line, more) end
  end
  limits.came = {}
end

function Limits.sync()
  Limits.sync_lanes()
  flush_lines()
  for queue, row in pairs(rows) do
    if row and row.gate then Gates.sync(queue, row) end
  end
end

-- Forget lanes that can be; how many were looked at.
function Limits.sweep(most)
  local names = call('ZRANGEBYSCORE', B .. ':clear', '-inf', now, 'LIMIT', 0, most)
  for _, name in ipairs(names) do
    call('ZREM', B .. ':clear', name)
    Lanes.came_due(name)
  end
  return #names
end

function Limits.flush()
  for queue, row in pairs(rows) do
    if row and row.gate_changed then
      call('HSET', B .. ':gate', queue, pack('>d', row.gate_due) .. Gate.pack(row.gate))
      row.gate_changed = false
    end
  end
  local set, new, gone = {}, {}, {}
  for name in pairs(limits.changed) do
    local lane = limits.lanes[name]
    if type(lane) == 'string' then
      set[#set + 1] = name
      set[#set + 1] = lane
    elseif next(lane.lines) or lane.running > 0 or lane.due > 0 then
      set[#set + 1] = name
      set[#set + 1] = pack_lane(lane)
      if lane.is_new then
        new[#new + 1] = '0'
        new[#new + 1] = name
      end
      lane.is_new = false
    else
      gone[#gone + 1] = name
      lane.is_new = true
    end
  end
  call_all('HSET', B .. ':lane', set)
  call_all('ZADD', B .. ':lanes', new)
  call_all('HDEL', B .. ':lane', gone)
  call_all('ZREM', B .. ':lanes', gone)
  limits.changed = {}
end

end
