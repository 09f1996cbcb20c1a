-- Change the rank of a job that does not run yet, or move the job to another queue.

local alter

do

-- The offset behind a text in msgpack.
local function behind_text(data, at)
  local code = byte(data, at)
  if code < 0xc0 then return at + 1 + code - 0xa0 end
  if code == 0xd9 then return at + 2 + byte(data, at + 1) end
  return at + 3 + unpk('>I2', data, at + 1)
end

-- An envelope with another queue. The queue is the second field of the envelope's array. The bytes of
-- the other fields stay, because cmsgpack would change their types.
local function with_queue(envelope, queue)
  local first, size = byte(envelope), #queue
  local at = behind_text(envelope, first == 0xdc and 4 or first == 0xdd and 6 or 2)
  local head = size < 32 and string.char(0xa0 + size) or string.char(0xd9, size)
  return sub(envelope, 1, at - 1) .. head .. queue .. sub(envelope, behind_text(envelope, at))
end

local function is_full(queue)
  local row = find_row(queue)
  if not row or row.max_size == 0 then return false end
  flush_lines()
  return size_of(queue) >= row.max_size
end

-- Put a job back into the table of its former state. The job is in no table now.
local function place_again(j, state, due)
  if state == WAITING then
    count(j.queue, 'waiting', 1)
    save(j)
  else
    place(j, state == SCHEDULED and due or 0)
  end
end

-- The line for the log of the job.
local function altered_text(rank, queue)
  local parts = {}
  if queue ~= '' then parts[1] = 'queue ' .. queue end
  if rank then parts[#parts + 1] = string.format('priority %g', (1024 - rank) / 10) end
  return 'altered: ' .. table.concat(parts, ', ')
end

-- True when the job was altered, or has the rank and the queue already; false when it is refused.
function alter(j)
  if j.state > READY then return false end
  if flagged(j.flags, LINKED) and links_of(j.id).waits == W_BARRIER then return false end
  local rank, queue = string.match(ARGV[6], '^(%d*) (.*)$')
  rank = tonumber(rank)
  local text = altered_text(rank, queue)
  if not rank then rank = j.rank end
  if queue == '' then queue = j.queue end
  local moves = queue ~= j.queue
  if moves and j.state ~= WAITING and is_full(queue) then return false end
  if not moves and rank == j.rank then return true end
  local state, due = j.state, j.due
  unplace(j)
  log(j, text, now / 1000000)
  j.rank = rank
  if moves then
    if row_of(j.queue).max_size > 0 then shrunk[j.queue] = true end
    envs[j.id] = with_queue(call('HGET', K_ENV, j.id), queue)
    j.queue = queue
  end
  place_again(j, state, due)
  return true
end

end
