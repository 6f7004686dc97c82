if not value then
    -- Refused by a replica: what it lacks, its primary may have. Elsewhere there is nothing to delete.
    redis.call('DEL', LOCK)
    pcall(grant_next)
end
return { 'lost', stamp }
